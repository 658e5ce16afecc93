//! What a client may hand over, counted and logged where it is more. Called by `keeper.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use stackwire_model::ExecutableKey;

use super::counts::{Counts, Refused};
use super::limits::Account;
use crate::receive::allowance::Allowance;

/// Of a stream.
#[derive(Debug)]
pub(super) struct Counted {
    account: Arc<Account>,
    counts: Counts,
    /// The log has it once.
    is_told: AtomicBool,
}

impl Counted {
    pub(super) fn new(account: &Arc<Account>, counts: &Counts) -> Self {
        let (account, counts) = (Arc::clone(account), counts.clone());
        Self { account, counts, is_told: AtomicBool::new(false) }
    }

    fn tell(&self, why: &str) {
        self.counts.refuse(Refused::Limit);
        if !self.is_told.swap(true, Ordering::Relaxed) {
            let client = &self.account.who;
            tracing::warn!(%client, "files of {client} are not taken: {why}");
        }
    }
}

impl Allowance for Counted {
    fn executable(&self, key: ExecutableKey) -> Result<(), String> {
        self.account.executable(key).inspect_err(|why| self.tell(why))
    }

    fn artifact(&self, bytes: u64) -> Result<(), String> {
        self.account.artifact(bytes).inspect_err(|why| self.tell(why))
    }
}
