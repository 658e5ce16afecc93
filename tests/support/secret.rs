//! What must not leave the host: bytes that each are 73 more than the one before. Nothing else has
//! as many of them in a row as are looked for.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

use prost::Message;
use stackwire_proto::v1::collector_message::Body;
use stackwire_proto::{FrameReader, open_epoch};

use super::Running;

/// Whether some of them are there.
pub(crate) fn has_secret(bytes: &[u8]) -> bool {
    let is_secret = |bytes: &[u8]| bytes.windows(2).all(|two| two[1].wrapping_sub(two[0]) == 73);
    bytes.windows(16).any(is_secret)
}

/// Asserts that they are in no message of a capture.
pub(crate) fn assert_no_secret(file: &Path) {
    let mut reader = FrameReader::new(File::open(file).unwrap());
    let mut messages = 0;
    while let Some(message) = reader.next_message().unwrap() {
        let bytes = match &message.body {
            Some(Body::Epoch(sealed)) => open_epoch(sealed).unwrap().encode_to_vec(),
            _ => message.encode_to_vec(),
        };
        assert!(!has_secret(&bytes), "in message {messages}");
        messages += 1;
    }
    assert!(messages > 2, "{messages}");
}

/// A Python that has them in its environment, its variables and its objects.
pub(crate) fn python_with_a_secret() -> Running {
    let program = "import os, sys\n\
        def spends(secret, text):\n    \
            local = {secret: text}\n    \
            while True:\n        \
                local.get(secret)\n\
        secret = os.environb[b'SECRET']\n\
        print('ready', flush=True)\n\
        spends(secret, secret.decode('latin-1'))\n";
    let mut python = Command::new("/usr/bin/python3");
    Running::start(python.args(["-c", program]).env("SECRET", OsStr::from_bytes(&secret())))
}

/// The same, a Ruby.
pub(crate) fn ruby_with_a_secret(mut ruby: Command) -> Running {
    let program = "def spends(secret, text)\n  \
        local = {secret => text}\n  \
        local[secret] while true\n\
        end\n\
        secret = ENV['SECRET']\n\
        puts 'ready'\n\
        $stdout.flush\n\
        spends(secret, secret * 2)\n";
    Running::start(ruby.args(["-e", program]).env("SECRET", OsStr::from_bytes(&secret())))
}

/// The same, a Node.
pub(crate) fn node_with_a_secret(node: &mut Command) -> Running {
    let program = "function spends(secret, text) {\n  \
        const local = new Map([[secret, text]]);\n  \
        for (;;) local.get(secret);\n\
        }\n\
        const bytes = Array.from({ length: 63 }, (_, at) => (at + 1) * 73 & 255);\n\
        const secret = String.fromCharCode(...bytes);\n\
        process.stdout.write('ready\\n');\n\
        spends(secret, secret.repeat(2));\n";
    Running::start(node.args(["-e", program]).env("SECRET", OsStr::from_bytes(&secret())))
}

fn secret() -> Vec<u8> {
    (1..64u32).map(|at| (at * 73) as u8).collect()
}
