//! The numbers of rules, which all tables share. Pure.

use std::collections::HashMap;

use stackwire_collector_ebpf::Rule;
use stackwire_collector_ebpf::tables::RULES;

/// Rules by number, as long as some table has them. Number 0, no rule, is always there.
#[derive(Debug)]
pub struct Rules {
    numbers: HashMap<Rule, u16>,
    /// By number, with how many tables have each.
    known: Vec<(Rule, u32)>,
    free: Vec<u16>,
    /// Given back, and perhaps being read.
    limbo: Vec<u16>,
}

impl Default for Rules {
    fn default() -> Self {
        let none = Rule::default();
        Self {
            numbers: HashMap::from([(none, 0)]),
            known: vec![(none, 1)],
            free: Vec::new(),
            limbo: Vec::new(),
        }
    }
}

impl Rules {
    /// Whether there are numbers for all of these.
    #[must_use]
    pub fn fit(&self, rules: &[Rule]) -> bool {
        let new = rules.iter().filter(|rule| !self.numbers.contains_key(rule)).count();
        new <= self.free.len() + (RULES as usize - self.known.len())
    }

    /// Numbers for these, which [`Rules::fit`]; a number that is new is written.
    ///
    /// # Errors
    /// Those of `write`: none has been taken then.
    pub fn take<E>(
        &mut self,
        rules: &[Rule],
        mut write: impl FnMut(u16, &Rule) -> Result<(), E>,
    ) -> Result<Vec<u16>, E> {
        let mut taken = Vec::with_capacity(rules.len());
        for rule in rules {
            let number = match self.numbers.get(rule) {
                Some(&number) => number,
                None => {
                    let number = self.free.pop().unwrap_or(self.known.len() as u16);
                    if let Err(error) = write(number, rule) {
                        self.free
                            .extend((usize::from(number) < self.known.len()).then_some(number));
                        self.give_back(&taken);
                        return Err(error);
                    }
                    if usize::from(number) == self.known.len() {
                        self.known.push((*rule, 0));
                    }
                    self.known[usize::from(number)] = (*rule, 0);
                    self.numbers.insert(*rule, number);
                    number
                }
            };
            self.known[usize::from(number)].1 += 1;
            taken.push(number);
        }
        Ok(taken)
    }

    /// A table less that has these.
    pub fn give_back(&mut self, numbers: &[u16]) {
        for &number in numbers {
            let (rule, tables) = &mut self.known[usize::from(number)];
            *tables = tables.saturating_sub(1);
            if *tables == 0 && number != 0 {
                self.numbers.remove(rule);
                self.limbo.push(number);
            }
        }
    }

    /// Whether [`Rules::reclaim`] would bring anything.
    #[must_use]
    pub fn has_limbo(&self) -> bool {
        !self.limbo.is_empty()
    }

    /// Makes what was given back available; the kernel side knows by now that what it reads there
    /// is not to be trusted.
    pub fn reclaim(&mut self) {
        self.free.append(&mut self.limbo);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(offset: i32) -> Rule {
        Rule { offset, ..Rule::default() }
    }

    #[test]
    fn numbers_are_shared_and_used_again_only_after_reclaim() {
        let mut rules = Rules::default();
        let ok = |_: u16, _: &Rule| Ok::<(), ()>(());
        let one = rules.take(&[Rule::default(), rule(1), rule(2)], ok).unwrap();
        let two = rules.take(&[Rule::default(), rule(2), rule(3)], ok).unwrap();
        assert_eq!((one.as_slice(), two.as_slice()), (&[0, 1, 2][..], &[0, 2, 3][..]));
        rules.give_back(&one);
        assert!(rules.has_limbo());
        assert_eq!(rules.take(&[rule(4)], ok).unwrap(), [4]);
        rules.reclaim();
        assert_eq!(rules.take(&[rule(5), rule(2)], ok).unwrap(), [1, 2]);
        assert_eq!(
            rules.take(&[rule(6), rule(7)], |at, _| if at > 5 { Err(()) } else { Ok(()) }),
            Err(())
        );
        let many: Vec<Rule> = (100..100 + RULES as i32).map(rule).collect();
        assert!(!rules.fit(&many) && rules.fit(&many[..1000]));
    }
}
