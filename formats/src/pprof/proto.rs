//! The messages of pprof's `profile.proto`, generated from `proto/profile.proto`, which is the
//! file of <https://github.com/google/pprof/tree/1facf8f91b50/proto> unchanged.

include!(concat!(env!("OUT_DIR"), "/perftools.profiles.rs"));
