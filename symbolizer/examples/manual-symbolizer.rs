//! Writes the man pages and shell completions of `stackwire` into a directory; `make install` does.

#[path = "../src/cli/mod.rs"]
mod cli;

use std::path::PathBuf;

use clap::CommandFactory;
use clap_complete::Shell;

fn main() -> std::io::Result<()> {
    let directory = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".to_owned()));
    std::fs::create_dir_all(&directory)?;
    let mut command = cli::Args::command();
    clap_mangen::generate_to(command.clone(), &directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut command, "stackwire", &directory)?;
    }
    Ok(())
}
