//! What a report shows, and how much of it.

/// What a report shows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// The label whose values get their shares.
    pub by: Option<&'a str>,
    /// Functions listed; 20 unless told, and no more than the window has room for.
    pub top: Option<usize>,
    /// Which functions come first.
    pub sort: Sort,
    /// To fit into a window: no more functions than it has room for, and of all else what is wrong.
    pub window: Option<Window>,
}

/// Which functions come first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// Those that take most themselves.
    #[default]
    Own,
    /// Those that take most with all they call.
    Total,
}

/// The size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Lines.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
}
