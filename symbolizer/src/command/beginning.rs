//! Finds a build-id by its first digits: reports print twelve. For `symbolize` and `cache rm`.

use std::collections::BTreeSet;
use std::fmt::Display;

use super::Failure;

/// What was typed if that is a known id, otherwise the one known id that begins with it, if one
/// does.
pub fn whole<T: Display + Clone>(typed: &str, known: &BTreeSet<T>) -> Result<Option<T>, Failure> {
    let typed = typed.to_ascii_lowercase();
    let known = known.iter().map(|id| (id, id.to_string()));
    let alike: Vec<(&T, String)> = known.filter(|(_, text)| text.starts_with(&typed)).collect();
    if let Some((same, _)) = alike.iter().find(|(_, text)| alike.len() == 1 || *text == typed) {
        return Ok(Some((*same).clone()));
    }
    if alike.is_empty() {
        return Ok(None);
    }
    let alike: Vec<String> = alike.into_iter().map(|(_, text)| text).collect();
    let message = format!("{typed} is the beginning of several build-ids: {}", alike.join(", "));
    Err(Failure::Usage(message))
}

#[cfg(test)]
mod tests {
    use stackwire::cache::Id;

    use super::*;

    #[test]
    fn one_that_begins_so_is_meant() {
        let known = ["0123456789ab", "0123456789abcdef", "fedcba9876543210"];
        let known: BTreeSet<Id> = known.iter().map(|id| id.parse().unwrap()).collect();
        let whole = |typed| whole(typed, &known);
        let meant = |typed| whole(typed).unwrap().map(|id| id.to_string());
        assert_eq!(meant("FEDCBA98").as_deref(), Some("fedcba9876543210"));
        assert_eq!(meant("0123456789ab").as_deref(), Some("0123456789ab"));
        assert_eq!(meant("0123456789abcd").as_deref(), Some("0123456789abcdef"));
        assert_eq!(meant("77777777"), None);
        assert!(matches!(whole("01234567"), Err(Failure::Usage(_))));
    }
}
