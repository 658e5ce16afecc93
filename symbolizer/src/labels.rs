//! Labels as they are typed, and as they are asked for over HTTP: `comm=postgres,thread=worker`.

/// Text that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a label is LABEL=VALUE, as comm=postgres")]
pub struct BadLabel;

/// Takes labels apart. A comma without a `=` behind it belongs to the value.
///
/// # Errors
/// See [`BadLabel`].
pub fn parse(text: &str) -> Result<Vec<(String, String)>, BadLabel> {
    let mut labels: Vec<(String, String)> = Vec::new();
    for piece in text.split(',') {
        match (piece.split_once('='), labels.last_mut()) {
            (Some(("", _)), _) | (None, None) => return Err(BadLabel),
            (Some((key, value)), _) => labels.push((key.to_owned(), value.to_owned())),
            (None, Some((_, value))) => *value = format!("{value},{piece}"),
        }
    }
    Ok(labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_taken_apart() {
        let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(parse("comm=a").unwrap(), [label("comm", "a")]);
        let several = [label("comm", "a,b"), label("thread", "x=y"), label("cpu", "")];
        assert_eq!(parse("comm=a,b,thread=x=y,cpu=").unwrap(), several);
        assert!(parse("comm").is_err() && parse("=a").is_err() && parse("").is_err());
    }
}
