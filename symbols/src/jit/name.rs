//! Names as JIT compilers write them: function and file taken apart. Pure.

use stackwire_model::profile::Line;

/// What a name says: `py::name:/path.py` (CPython), `JS:*name /path:1:17` (V8), `type [module]
/// Class::name()[tier]` (.NET), `wasm[0]::function[5]::name` (Wasmtime); another is a function.
#[must_use]
pub fn line(name: &str) -> Line {
    let apart = python(name).or_else(|| script(name)).or_else(|| dotnet(name));
    let apart = apart.or_else(|| wasm(name));
    apart.unwrap_or_else(|| Line { function: name.into(), ..Line::default() })
}

fn python(name: &str) -> Option<Line> {
    let (function, file) = name.strip_prefix("py::")?.rsplit_once(":/")?;
    Some(Line { function: function.into(), file: format!("/{file}").into(), line: 0 })
}

fn script(name: &str) -> Option<Line> {
    let prefixes = ["JS:", "LazyCompile:", "Function:", "Script:", "Eval:"];
    let script = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix))?;
    let (function, place) = script.split_once(' ')?;
    // The mark of the tier that compiled it: `*` optimized, `~` interpreted, `^` and `+` between.
    let function = function.trim_start_matches(['*', '~', '^', '+']);
    let mut parts = place.rsplitn(3, ':');
    let (_column, number, file) = (parts.next()?, parts.next()?, parts.next()?);
    let line = number.parse().ok()?;
    let function = if function.is_empty() { "(anonymous)" } else { function };
    Some(Line { function: function.into(), file: file.into(), line })
}

/// `instance void [System.Private.CoreLib] System.Threading.Thread::StartCallback()[PreStub]`.
fn dotnet(name: &str) -> Option<Line> {
    let (before, rest) = name.split_once(" [")?;
    let (module, function) = rest.split_once("] ")?;
    let known = [
        "PreStub",
        "Tier0",
        "Tier1",
        "OptimizedTier",
        "Optimized",
        "MinOptJitted",
        "Instrumented",
        "ReadyToRun",
        "Unknown",
        "PreJIT",
        "QuickJitted",
    ];
    let (function, tier) = function.strip_suffix(']')?.rsplit_once('[')?;
    let is_one = !before.is_empty()
        && function.contains("::")
        && known.iter().any(|known| tier.starts_with(known));
    is_one.then(|| Line { function: function.into(), file: module.into(), line: 0 })
}

fn wasm(name: &str) -> Option<Line> {
    let (module, rest) = name.split_once("::")?;
    let number = module.strip_prefix("wasm[")?.strip_suffix(']')?;
    number.parse::<u32>().ok()?;
    let (index, named) = rest.split_once("::").unwrap_or((rest, rest));
    index.starts_with("function[").then(|| Line {
        function: named.into(),
        file: module.into(),
        line: 0,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_taken_apart() {
        let parts = |name| {
            let line = line(name);
            (line.function.to_string(), line.file.to_string(), line.line)
        };
        let is = |function: &str, file: &str, line| (function.to_owned(), file.to_owned(), line);
        assert_eq!(parts("py::leafy:/a b/x.py"), is("leafy", "/a b/x.py", 0));
        assert_eq!(parts("JS:*hot /app/x.js:3:17"), is("hot", "/app/x.js", 3));
        assert_eq!(parts("JS:~ node:internal/x:10:2"), is("(anonymous)", "node:internal/x", 10));
        assert_eq!(parts("Builtin:ArrayMap"), is("Builtin:ArrayMap", "", 0));
        assert_eq!(parts("long J.hot(int)"), is("long J.hot(int)", "", 0));
        assert_eq!(
            parts(
                "void [System.Private.CoreLib] System.Threading.Thread::StartCallback()[OptimizedTier1]"
            ),
            is("System.Threading.Thread::StartCallback()", "System.Private.CoreLib", 0)
        );
        assert_eq!(
            parts("instance int32[] [app] Hot.Loop::Run(int32[])[Tier0]"),
            is("Hot.Loop::Run(int32[])", "app", 0)
        );
        assert_eq!(parts("int [] f(int)"), is("int [] f(int)", "", 0));
        assert_eq!(parts("wasm[0]::function[5]::fib"), is("fib", "wasm[0]", 0));
        assert_eq!(parts("wasm[0]::function[5]"), is("function[5]", "wasm[0]", 0));
    }

    proptest! {
        #[test]
        fn never_panics(name in "\\PC{0,60}") {
            let _ = line(&name);
        }
    }
}
