//! Each second: whether collectors are served, for probes and metrics, and how much there is.

use std::sync::Arc;
use std::time::Duration;

use stackwire_proto::v1::symbolizer_server::SERVICE_NAME;
use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::counts::Counts;
use super::limits::Ledger;
use super::store::Store;
use crate::metrics::Metrics;

/// What is looked at, and who is told.
pub(super) struct Pulse {
    pub store: Arc<Store>,
    pub ledger: Arc<Ledger>,
    pub counts: Counts,
    pub metrics: Arc<Metrics>,
    pub reporter: HealthReporter,
}

/// Between two looks.
const BEAT: Duration = Duration::from_secs(1);

impl Pulse {
    /// Looks until the server stops, and says then that it does.
    pub(super) async fn beat(self, mut closing: watch::Receiver<bool>) {
        loop {
            self.look().await;
            tokio::select! {
                () = tokio::time::sleep(BEAT) => {}
                _ = closing.wait_for(|closing| *closing) => break,
            }
        }
        self.say(Some("the server stops".to_owned())).await;
    }

    async fn look(&self) {
        let store = Arc::clone(&self.store);
        let found = tokio::task::spawn_blocking(move || (store.room().err(), store.now())).await;
        // Neither panics.
        let Ok((why_not, mut now)) = found else { return };
        (now.clients, now.streams) = self.ledger.present();
        now.is_ready = why_not.is_none();
        self.counts.now(now);
        self.say(why_not.map(|why| why.to_string())).await;
    }

    async fn say(&self, why_not: Option<String>) {
        let status = match why_not {
            None => ServingStatus::Serving,
            Some(_) => ServingStatus::NotServing,
        };
        for name in ["", SERVICE_NAME] {
            self.reporter.set_service_status(name, status).await;
        }
        self.metrics.readiness.set(why_not);
    }
}
