//! Which CPU the host has, in perf's words (`HEADER_CPUID` and `HEADER_CPUDESC` of perf.data):
//! `perf annotate` asks.

/// Id and description of a CPU; empty where they are not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// As `AuthenticAMD,26,2,1`: vendor, family, model, stepping.
    pub id: String,
    /// As `AMD EPYC 9354`.
    pub description: String,
}

/// The first CPU in `/proc/cpuinfo` of x86. Pure.
#[must_use]
pub fn parse(cpuinfo: &str) -> Cpu {
    let first = cpuinfo.split("\n\n").next().unwrap_or_default();
    let field = |name: &str| {
        let mut fields = first.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim())
    };
    let parts = ["vendor_id", "cpu family", "model", "stepping"].map(field);
    let id = match parts {
        [Some(vendor), Some(family), Some(model), Some(stepping)] => {
            format!("{vendor},{family},{model},{stepping}")
        }
        _ => String::new(),
    };
    Cpu { id, description: field("model name").unwrap_or_default().to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cpu_is_told_as_perf_does() {
        let text = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n\
            model name\t: AMD EPYC\nstepping\t: 1\n\nprocessor\t: 1\nvendor_id\t: Other\n";
        let expected = Cpu { id: "AuthenticAMD,26,2,1".into(), description: "AMD EPYC".into() };
        assert_eq!(parse(text), expected);
        assert_eq!(parse("CPU implementer\t: 0x41\n"), Cpu::default());
    }
}
