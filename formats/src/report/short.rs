//! Makes names of functions short for a column of a terminal. The part that says what the function
//! is called comes last in a name, and stays. Pure.

/// The name without its return type and, where it is longer than `width` characters, without
/// parameters and then without its beginning, as `…vector<int>::push_back`.
#[must_use]
pub fn short(name: &str, width: usize) -> String {
    let (start, parameters) = parts(name);
    let name = &name[start..];
    if name.chars().count() <= width {
        return name.to_owned();
    }
    let called = parameters.map_or(name, |at| &name[..at - start]);
    let length = called.chars().count();
    if length <= width {
        return called.to_owned();
    }
    let kept = width.saturating_sub(1);
    ['…'].into_iter().chain(called.chars().skip(length - kept)).collect()
}

/// Where what is called begins behind a return type, and where a list of parameters that ends the
/// name begins. C++ has them; what other languages write has no space outside of brackets, or no
/// parameters.
fn parts(name: &str) -> (usize, Option<usize>) {
    let mut depth = 0u32;
    let (mut space, mut opened, mut parameters) = (0, 0, None);
    let mut rest = name;
    while let Some(c) = rest.chars().next() {
        let at = name.len() - rest.len();
        // The brackets and signs of an operator are no brackets; its name may have a space in it.
        if depth == 0 && is_operator(name, at) {
            let sign = rest["operator".len()..].find('(').map_or(0, |open| open.max(1));
            // `operator()` is called so.
            let sign = if rest["operator".len()..].starts_with("()") { 2 } else { sign };
            rest = rest.get("operator".len() + sign..).unwrap_or_default();
            continue;
        }
        match c {
            '(' | '<' | '[' | '{' => {
                opened = if depth == 0 { at } else { opened };
                depth += 1;
            }
            ')' | '>' | ']' | '}' => {
                depth = depth.saturating_sub(1);
                // Only ` const` and the like come behind: `(anonymous namespace)::f` and
                // `main.(*T).f` go on.
                let ends = matches!(rest[1..].chars().next(), None | Some(' '));
                if c == ')' && depth == 0 && ends && opened > space {
                    parameters = parameters.or(Some(opened));
                }
            }
            ' ' if depth == 0 && parameters.is_none() => space = at + 1,
            _ => {}
        }
        rest = &rest[c.len_utf8()..];
    }
    match parameters {
        Some(_) => (space, parameters),
        // A space in what is not C++ is part of the name.
        None => (0, None),
    }
}

fn is_operator(name: &str, at: usize) -> bool {
    let begins = name[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_');
    let rest = &name[at..];
    let ends = rest.strip_prefix("operator").and_then(|rest| rest.chars().next());
    begins && ends.is_some_and(|c| !c.is_alphanumeric() && c != '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_types_go_and_ends_stay() {
        for (name, whole, small) in [
            ("main", "main", "main"),
            (
                "void std::vector<int, std::allocator<int> >::push_back(int const&)",
                "std::vector<int, std::allocator<int> >::push_back(int const&)",
                "…r<int> >::push_back",
            ),
            ("bool operator==<int>(A<int>, B)", "operator==<int>(A<int>, B)", "operator==<int>"),
            ("auto f::operator()(int) const", "f::operator()(int) const", "f::operator()"),
            ("x::operator bool() const", "x::operator bool() const", "x::operator bool"),
            ("operator new(unsigned long)", "operator new(unsigned long)", "operator new"),
            ("bool a::operator<(b<c> const&)", "a::operator<(b<c> const&)", "a::operator<"),
            (
                "(anonymous namespace)::f(int, int, int)",
                "(anonymous namespace)::f(int, int, int)",
                "…ymous namespace)::f",
            ),
            ("<Apple as Eat>::eat", "<Apple as Eat>::eat", "<Apple as Eat>::eat"),
            ("runtime.(*mcache).refill", "runtime.(*mcache).refill", "…me.(*mcache).refill"),
            ("py::f:/a directory/x.py", "py::f:/a directory/x.py", "…f:/a directory/x.py"),
            ("LazyCompile:*f /x y.js:3:1", "LazyCompile:*f /x y.js:3:1", "…pile:*f /x y.js:3:1"),
        ] {
            assert_eq!(short(name, 200), whole, "{name}");
            assert_eq!(short(name, 20), small, "{name}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_name_is_too_odd(name in ".{0,80}", width in 1usize..40) {
            proptest::prop_assert!(short(&name, width).chars().count() <= width);
        }
        #[test]
        fn nor_one_of_brackets(name in "[ ()<>a:]{0,40}|(operator[ ()<>a:]{0,9}){0,3}", width in 1usize..40) {
            proptest::prop_assert!(short(&name, width).chars().count() <= width);
        }
    }
}
