//! The users of a process, from `/proc/PID/status`.

use super::text;

/// Users of a process, as this process sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Users {
    /// Who started it.
    pub real: u32,
    /// The user whose rights it may use. For a set-user-ID program this is the owner of the
    /// program, even while it acts for another user.
    pub saved: u32,
}

/// The users of a process; `None` when it is gone or hidden.
#[must_use]
pub fn of(pid: u32) -> Option<Users> {
    parse(&text::read(format!("/proc/{pid}/status")).ok()?)
}

/// proc_pid_status(5): real, effective, saved and file system user, behind `Uid:`.
fn parse(status: &str) -> Option<Users> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    let mut numbers = line.split_whitespace().map_while(|number| number.parse().ok());
    Some(Users { real: numbers.next()?, saved: numbers.nth(1)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_and_saved_are_told_apart() {
        let found = parse("Name:\tUid:\nUmask:\t0022\nUid:\t1000\t7\t0\t0\nGid:\t1\t2\t3\t4\n");
        assert_eq!(found, Some(Users { real: 1000, saved: 0 }));
        assert_eq!(parse("Uid:\t7\t7\n"), None);
        let real = rustix::process::getuid().as_raw();
        assert_eq!(of(std::process::id()).map(|users| users.real), Some(real));
    }
}
