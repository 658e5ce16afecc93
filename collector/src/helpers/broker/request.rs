//! What the broker is asked, as bytes, and what it says of Python processes. Pure.

use std::time::Duration;

use stackwire_model::{PythonOutcome, UserAddr};
use zerocopy::{FromBytes, IntoBytes};

use super::LIMIT;
use super::inject::Places;
use crate::process::Wanted;

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// To open a file, within a time.
    Open(Wanted, Duration),
    /// Of Python processes.
    Python(PythonRequest),
}

/// About the perf trampolines of Python processes. Each is answered with what came of all so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PythonRequest {
    /// To switch one on.
    SwitchOn {
        /// The process.
        pid: u32,
        /// Where in it.
        places: Box<Places>,
    },
    /// Nothing but the answer.
    Outcomes,
    /// To switch all off.
    SwitchOff,
}

impl Request {
    /// Pid, kind, two numbers, a limit in milliseconds; then a path or places.
    pub(super) fn encode(&self) -> Vec<u8> {
        let (pid, kind, first, second, limit, rest) = match self {
            Self::Open(wanted, limit) => {
                let (pid, kind, first, second, path) = match wanted {
                    Wanted::Mapped { pid, start, end, path } => {
                        (*pid, 0u32, start.0, end.0, path.as_str())
                    }
                    Wanted::Own { pid, path, here } => {
                        (*pid, 1, u64::from(*here), 0, path.as_str())
                    }
                    Wanted::Said { pid, context } => (*pid, 2, context.map_or(0, |at| at.0), 0, ""),
                };
                (pid, kind, first, second, limit.as_millis() as u64, path.as_bytes())
            }
            Self::Python(PythonRequest::SwitchOn { pid, places }) => {
                (*pid, 3, 0, 0, 0, places.as_bytes())
            }
            Self::Python(PythonRequest::Outcomes) => (0, 4, 0, 0, 0, &[][..]),
            Self::Python(PythonRequest::SwitchOff) => (0, 5, 0, 0, 0, &[][..]),
        };
        let mut message = Vec::with_capacity(32 + rest.len());
        message.extend(pid.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend(first.to_ne_bytes());
        message.extend(second.to_ne_bytes());
        message.extend(limit.to_ne_bytes());
        message.extend(rest);
        message
    }

    /// None: it is no request.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let (head, rest) = message.split_first_chunk::<32>()?;
        let long = |at: usize| -> u64 {
            u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|byte| head[at + byte]))
        };
        let word =
            |at: usize| -> u32 { u32::from_ne_bytes([0, 1, 2, 3].map(|byte| head[at + byte])) };
        let pid = word(0);
        let path = || std::str::from_utf8(rest).ok().map(str::to_owned);
        let wanted = match word(4) {
            0 => Wanted::Mapped {
                pid,
                start: UserAddr(long(8)),
                end: UserAddr(long(16)),
                path: path()?,
            },
            1 => Wanted::Own { pid, path: path()?, here: long(8) != 0 },
            2 => Wanted::Said { pid, context: Some(UserAddr(long(8))).filter(|at| at.0 != 0) },
            3 => {
                let places = Box::new(Places::read_from_bytes(rest).ok()?);
                return Some(Self::Python(PythonRequest::SwitchOn { pid, places }));
            }
            4 => return Some(Self::Python(PythonRequest::Outcomes)),
            5 => return Some(Self::Python(PythonRequest::SwitchOff)),
            _ => return None,
        };
        Some(Self::Open(wanted, Duration::from_millis(long(24)).min(LIMIT)))
    }
}

/// Four bytes of pid and one of outcome, for each.
pub(super) fn encode_outcomes(outcomes: impl Iterator<Item = (u32, PythonOutcome)>) -> Vec<u8> {
    let mut message = Vec::new();
    for (pid, outcome) in outcomes {
        message.extend(pid.to_ne_bytes());
        message.push(outcome.number());
    }
    message
}

/// What that says; a part that is cut off is left out.
pub(super) fn decode_outcomes(message: &[u8]) -> Vec<(u32, PythonOutcome)> {
    let (parts, _) = message.as_chunks::<5>();
    let one = |&[a, b, c, d, number]: &[u8; 5]| {
        Some((u32::from_ne_bytes([a, b, c, d]), PythonOutcome::of_number(number)?))
    };
    parts.iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Function;
    use super::*;

    #[test]
    fn requests_survive_their_way() {
        let path = "/a b/c".to_owned();
        let limit = Duration::from_millis(50);
        let open = [
            Wanted::Mapped {
                pid: 7,
                start: UserAddr(0x1000),
                end: UserAddr(0x2000),
                path: path.clone(),
            },
            Wanted::Own { pid: 8, path, here: true },
            Wanted::Said { pid: 9, context: Some(UserAddr(0x1000)) },
            Wanted::Said { pid: 9, context: None },
        ];
        let places = Places {
            map: Function { at: 5, head: [6; 16] },
            evaluator_end: 7,
            ..Places::default()
        };
        let python = [
            PythonRequest::SwitchOn { pid: 7, places: Box::new(places) },
            PythonRequest::Outcomes,
            PythonRequest::SwitchOff,
        ];
        let open = open.into_iter().map(|wanted| Request::Open(wanted, limit));
        for request in open.chain(python.map(Request::Python)) {
            assert_eq!(Request::decode(&request.encode()).unwrap(), request);
        }
        assert_eq!(Request::decode(b"short"), None);
    }

    #[test]
    fn so_do_outcomes() {
        let outcomes: Vec<_> = PythonOutcome::ALL.into_iter().map(|it| (70_000, it)).collect();
        let mut message = encode_outcomes(outcomes.iter().copied());
        message.push(0);
        assert_eq!(decode_outcomes(&message), outcomes);
        assert_eq!(decode_outcomes(&[1, 0, 0, 0, 200]), []);
    }
}
