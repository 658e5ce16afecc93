//! Checks the structure that ARCHITECTURE.md describes: crates depend only downwards, and no cycle
//! joins files.
//!
//! Reads the sources. Does not look at what a module and its own children use of each other, nor at
//! what is written inside macros. Tests in a file may use anything.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::visit::Visit;
use syn::{Attribute, File, ItemMod, ItemUse, UseTree, Visibility};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The first table of ARCHITECTURE.md: each crate may use those below it.
fn crates() -> Vec<&'static str> {
    let rows = include_str!("../ARCHITECTURE.md").lines().skip_while(|line| !line.starts_with('|'));
    let rows = rows.take_while(|line| line.starts_with('|'));
    rows.filter_map(|row| row.strip_prefix("| `")?.split('`').next()).collect()
}

#[test]
fn crates_depend_downwards() {
    let crates = crates();
    assert_eq!(crates.len(), 11);
    for (place, name) in crates.iter().enumerate() {
        let manifest = std::fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        let used = manifest.lines().filter_map(|line| {
            let dependency = line.trim_start_matches("[dependencies.").strip_prefix("stackwire")?;
            let dependency = dependency.split(['.', ' ', ']']).next()?;
            Some(if dependency.is_empty() { "symbolizer" } else { &dependency[1..] })
        });
        for used in used {
            // The halves meet on the wire.
            let may = crates[place + 1..].contains(&used) && used != "collector";
            assert!(may, "{name} depends on {used}");
        }
    }
}

/// A module by its path in the crate: `["process", "maps"]`.
type Module = Vec<String>;

/// What a file uses of its own crate, each path whole, and under which names it passes on what it
/// uses.
#[derive(Default)]
struct Used {
    here: Module,
    paths: Vec<Module>,
    passed_on: BTreeMap<String, Module>,
}

impl Used {
    /// From the root of the crate; none of another crate.
    fn absolute(&self, path: &[String]) -> Option<Module> {
        let mut from = match path.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => self.here.clone(),
            _ => return None,
        };
        for name in path {
            match name.as_str() {
                "crate" | "self" => {}
                "super" => drop(from.pop()),
                name => from.push(name.to_owned()),
            }
        }
        Some(from)
    }

    fn tree(&mut self, tree: &UseTree, before: &[String], public: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (path, name) = match tree {
            UseTree::Path(path) => return self.tree(&path.tree, &with(&path.ident), public),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|item| self.tree(item, before, public));
            }
            UseTree::Name(name) => (with(&name.ident), name.ident.to_string()),
            UseTree::Rename(rename) => (with(&rename.ident), rename.rename.to_string()),
            UseTree::Glob(_) => (before.to_vec(), "*".to_owned()),
        };
        let Some(path) = self.absolute(&path) else { return };
        if public {
            self.passed_on.insert(name, path);
        } else {
            self.paths.push(path);
        }
    }
}

fn is_of_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute.meta.require_list().map(|list| list.tokens.to_string());
        attribute.path().is_ident("cfg") && text.is_ok_and(|text| text == "test")
    })
}

impl Visit<'_> for Used {
    fn visit_item_mod(&mut self, item: &ItemMod) {
        if !is_of_tests(&item.attrs) {
            syn::visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &ItemUse) {
        if !is_of_tests(&item.attrs) {
            self.tree(&item.tree, &[], !matches!(item.vis, Visibility::Inherited));
        }
    }

    fn visit_path(&mut self, path: &syn::Path) {
        let names: Vec<_> = path.segments.iter().map(|it| it.ident.to_string()).collect();
        self.paths.extend(self.absolute(&names).filter(|_| names.len() > 1));
        syn::visit::visit_path(self, path);
    }
}

fn files(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, into);
        } else if path.extension().is_some_and(|it| it == "rs") {
            into.push(path);
        }
    }
}

/// The module a file is; `lib.rs` and `main.rs` are the crate itself.
fn module(file: &Path, sources: &Path) -> Module {
    let path = file.strip_prefix(sources).unwrap().with_extension("");
    let names = path.iter().map(|name| name.to_str().unwrap().to_owned());
    names.filter(|name| !["mod", "lib", "main"].contains(&name.as_str())).collect()
}

/// Files of a crate, each with those it uses.
fn uses(sources: &Path) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut found = Vec::new();
    files(sources, &mut found);
    let mut used: BTreeMap<Module, Used> = BTreeMap::new();
    for file in found {
        let text: File = syn::parse_file(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let here = module(&file, sources);
        let file = used.entry(here.clone()).or_insert(Used { here, ..Used::default() });
        file.visit_file(&text);
    }
    let defining = |path: &Module| -> Option<Module> {
        let mut path = path.clone();
        // What is passed on is of the file that has it.
        for _ in 0..8 {
            let length = (0..=path.len()).rev().find(|&n| used.contains_key(&path[..n]))?;
            let (file, item) = path.split_at(length);
            match item.first().and_then(|name| used[file].passed_on.get(name)) {
                Some(whole) => path = [whole, &item[1..]].concat(),
                None => return Some(file.to_vec()),
            }
        }
        None
    };
    let of = |(module, used): (&Module, &Used)| {
        let others = used.paths.iter().filter_map(&defining);
        let room = |other: &Module| other.starts_with(module) || module.starts_with(other);
        (module.clone(), others.filter(|other| !room(other)).collect())
    };
    used.iter().map(of).collect()
}

/// A way from a file back to it.
fn circle(uses: &BTreeMap<Module, BTreeSet<Module>>) -> Option<Vec<Module>> {
    uses.keys().find_map(|start| {
        let mut before: BTreeMap<&Module, &Module> = BTreeMap::new();
        let mut next = vec![start];
        while let Some(at) = next.pop() {
            for used in &uses[at] {
                if used == start {
                    let mut way = vec![start.clone(), at.clone()];
                    let mut at = at;
                    while let Some(&from) = before.get(at) {
                        way.push(from.clone());
                        at = from;
                    }
                    return Some(way);
                }
                if !before.contains_key(used) {
                    before.insert(used, at);
                    next.push(used);
                }
            }
        }
        None
    })
}

#[test]
fn no_circle_joins_files() {
    let mut found = 0;
    for name in crates() {
        let uses = uses(&root().join(name).join("src"));
        found += uses.values().map(BTreeSet::len).sum::<usize>();
        assert_eq!(circle(&uses), None, "of {name}, the last uses the first");
    }
    assert!(found > 380, "only {found} uses are found");
}

/// Code is held to it by rustfmt.
#[test]
fn comments_are_of_100_columns_at_most() {
    let mut sources = Vec::new();
    for name in crates().into_iter().chain(["tests"]) {
        files(&root().join(name), &mut sources);
    }
    let wide = |file: &PathBuf| {
        let text = std::fs::read_to_string(file).unwrap();
        let comments = text.lines().filter(|line| line.trim_start().starts_with("//"));
        comments.filter(|line| line.chars().count() > 100).count()
    };
    let wide: Vec<_> = sources.iter().filter(|file| wide(file) > 0).collect();
    assert!(sources.len() > 200 && wide.is_empty(), "{wide:?}");
}
