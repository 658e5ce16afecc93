//! A Python process: has it run a line of Python that switches its trampoline on or off, and hears
//! what came of it.

use std::cell::RefCell;
use std::time::Duration;

use stackwire_model::PythonOutcome;

use super::Places;
use super::page::Page;
use super::process::{Process, in_time};
use super::remote::{Remote, Script};

/// What the line of Python says.
const ON: u8 = 1;
const WAS_ON: u8 = 2;
const REFUSED: u8 = 3;
const OFF: u8 = 4;
const SPENT: u8 = 5;
/// How long a line that is running already may take.
const ENDS_IN: Duration = Duration::from_millis(50);
/// Behind the line in a page; where a byte is that it says, and who has made the page.
const ROOM: u64 = 3072;
const OWNER: u64 = 16;

/// A process, and how it is asked.
pub(super) struct Target<'p> {
    process: &'p Process,
    way: Way<'p>,
    said: u64,
    owner: [u8; 16],
}

enum Way<'p> {
    Page(Page<'p>),
    /// With the file that it is to run.
    Remote(Remote<'p>, RefCell<Option<Script>>),
}

impl<'p> Target<'p> {
    /// Finds the way to it.
    ///
    /// # Errors
    /// Why there is none.
    pub(super) fn open(process: &'p Process, places: &'p Places) -> Result<Self, PythonOutcome> {
        let mut owner = [0; 16];
        rustix::rand::getrandom(&mut owner, rustix::rand::GetRandomFlags::INSECURE)
            .map_err(|_error| PythonOutcome::Lost)?;
        let (way, said) = if places.remote.is_known() {
            let remote = Remote::find(process, places)?;
            let room = remote.room();
            (Way::Remote(remote, RefCell::default()), room)
        } else {
            let page = Page::map(process, places, &owner)?;
            let room = page.at + ROOM;
            (Way::Page(page), room)
        };
        process.write(&owner, said.wrapping_add(OWNER))?;
        Ok(Self { process, way, said, owner })
    }

    /// Asks it to switch its trampoline on.
    ///
    /// # Errors
    /// Why it could not be asked. What it does then, [`Target::outcome`] says.
    pub(super) fn switch_on(&self) -> Result<(), PythonOutcome> {
        self.run(&switching_on(self.said))
    }

    /// Gives back what it has got, when it could not be asked for this reason.
    pub(super) fn abandon(&self, why: PythonOutcome) {
        // Of one that does not stop nothing more may be wanted: the end of this process lets it go.
        if let Way::Page(page) = &self.way
            && why != PythonOutcome::Unresponsive
        {
            page.unmap();
        }
    }

    /// What came of it so far. None: the main thread has not come to it.
    pub(super) fn outcome(&self) -> Option<PythonOutcome> {
        let outcome = match self.said() {
            None => PythonOutcome::Ended,
            Some(ON) => PythonOutcome::Activated,
            Some(WAS_ON) => PythonOutcome::WasActive,
            Some(REFUSED) => PythonOutcome::Refused,
            Some(SPENT) => PythonOutcome::Spent,
            Some(_) => return None,
        };
        if let Way::Remote(_, script) = &self.way {
            script.take();
        }
        Some(outcome)
    }

    /// As [`Target::outcome`], for which it waits a while.
    pub(super) fn outcome_in(&self, time: Duration) -> Option<PythonOutcome> {
        in_time(time, || self.outcome().is_some());
        self.outcome()
    }

    /// Undoes all: what is on goes off, what is to be run is not, and a page is given back. A page
    /// stays where a call is still to come that reads it.
    pub(super) fn switch_off(self, patience: Duration) -> PythonOutcome {
        let mut before = self.outcome();
        if before.is_none() {
            self.cancel();
            before = self.outcome_in(ENDS_IN);
        }
        let Some(outcome) = before else { return PythonOutcome::Waiting };
        if outcome == PythonOutcome::Activated {
            let is_off = || self.said().is_none_or(|said| said == OFF);
            if self.run(&switching_off(self.said)).is_err() {
                return PythonOutcome::LeftOn;
            }
            if !in_time(patience, is_off) {
                if let Way::Remote(..) = &self.way {
                    // Its file goes with this process. A page stays, and is read when the main
                    // thread comes to it.
                    self.cancel();
                }
                if !in_time(ENDS_IN, is_off) {
                    return PythonOutcome::LeftOn;
                }
            }
        }
        if let Way::Page(page) = &self.way
            && self.said().is_some()
        {
            page.unmap();
        }
        outcome
    }

    /// Has the main thread run a line, as soon as it comes to it.
    fn run(&self, line: &str) -> Result<(), PythonOutcome> {
        self.process.write(&[0], self.said)?;
        match &self.way {
            Way::Page(page) => {
                self.process.write(&[line.as_bytes(), &[0]].concat(), page.at)?;
                page.run()
            }
            Way::Remote(remote, kept) => {
                // It has the same name.
                kept.take();
                let script = Script::write(self.process, &self.owner, line)
                    .map_err(|_error| PythonOutcome::NoScript)?;
                remote.run(&script)?;
                kept.replace(Some(script));
                Ok(())
            }
        }
    }

    /// Has it run nothing. It may be running this moment.
    fn cancel(&self) {
        match &self.way {
            Way::Page(page) => {
                // The line becomes a comment.
                let _ = self.process.write(b"#", page.at);
            }
            Way::Remote(remote, _) => remote.cancel(),
        }
    }

    /// What the line has said. None: it has ended, or is another program by now.
    fn said(&self) -> Option<u8> {
        let owner = self.process.read(self.said.wrapping_add(OWNER));
        let [said] = self.process.read(self.said)?;
        (owner == Some(self.owner)).then_some(said)
    }
}

/// A line that switches it on. The mark that it leaves is inherited by children, which have the
/// trampoline on as well: what finds it there is ours. One that stays says that it was on before.
fn switching_on(said: u64) -> String {
    line(
        said,
        REFUSED,
        &format!(
            "  a=sys.is_stack_trampoline_active\\n  s=getattr(sys,'_stackwire',None)\\n  \
             if a() and not s: o={WAS_ON}\\n  elif s==0: o={SPENT}\\n  elif i<2:\\n   \
             sys._stackwire=1\\n   a() or sys.activate_stack_trampoline('perf')\\n   o={ON}\\n  \
             elif s: del sys._stackwire\\n"
        ),
    )
}

/// A line that switches it off, if it has the mark.
///
/// From 3.13.12 and 3.14.3 on, each time it is switched on leaves one more watcher of code objects,
/// all of which give a trampoline back that is used once, so that one in use is freed and the
/// program crashes (python/cpython issue 146522). There the mark stays, to say so.
fn switching_off(said: u64) -> String {
    line(
        said,
        OFF,
        "  if getattr(sys,'_stackwire',0):\\n   sys.deactivate_stack_trampoline()\\n   \
         v=sys.version_info[:3]\\n   \
         if v>=(3,14,3) or (3,13,12)<=v<(3,14): sys._stackwire=0\\n   \
         else: del sys._stackwire\\n",
    )
}

/// One line of Python that does something and writes `o` to memory. It leaves no name behind but
/// the mark.
///
/// Not caught: what a handler of a signal raises while the line is compiled, before its `try`. The
/// program then sees `SystemError`, as CPython has it of a pending call that failed.
///
/// What it does may be done again: handlers of signals run between any two instructions, and one
/// that raises an exception cuts it short. That signal is sent again, so that its handler runs once
/// more when the line is over. What cannot write to its memory does nothing.
fn line(said: u64, outcome: u8, does: &str) -> String {
    format!(
        "__import__('builtins').exec(\"import sys\\no={outcome}\\nfor i in 0,1,2:\\n try:\\n  \
         m=open('/proc/self/mem','r+b',0)\\n{does}  m.seek({said})\\n  m.write(bytes([o]))\\n  \
         m.close()\\n  break\\n except BaseException as e:\\n  try:\\n   t=e.__traceback__.tb_next\\n   \
         n=t and t.tb_frame.f_locals.get(t.tb_frame.f_code.co_varnames[0])\\n   \
         if type(n) is int or isinstance(e,KeyboardInterrupt): \
         __import__('_thread').interrupt_main(n or 2)\\n  except BaseException: pass\",{{}})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_one_line_and_fit_in_a_page() {
        for line in [switching_on(u64::MAX), switching_off(u64::MAX)] {
            assert!(!line.contains('\n') && line.matches('"').count() == 2, "{line}");
            assert!(line.len() < ROOM as usize);
        }
    }
}
