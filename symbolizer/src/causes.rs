//! What an error says with its causes: those of HTTP clients keep the reason in the last of them.
//! Called by who asks servers.

/// An error with its causes, and without the address it repeats.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = String::new();
    let mut cause = Some(error);
    while let Some(error) = cause {
        let part = error.to_string();
        let part = part.split(" for url").next().unwrap_or_default();
        if !text.contains(part) {
            text += if text.is_empty() { "" } else { ": " };
            text += part;
        }
        cause = error.source();
    }
    text
}
