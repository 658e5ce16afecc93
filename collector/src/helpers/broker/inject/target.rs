//! A Python process: has it run a text (`text.rs`) that switches its trampoline on or off, and
//! hears what came of it.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use stackwire_model::PythonOutcome;

use super::Places;
use super::page::Page;
use super::process::{PAUSE, Process, in_time};
use super::remote::{Remote, Script};
use super::text::{
    ASKED, BEGUN, CUT_SHORT, NOTHING, OFF, ON, REFUSED, ROOM, SPENT, WAS_ON, switching_off,
    switching_on,
};

/// How long Python 3.14 may take from forgetting what it was asked to running it.
const BEGINS_IN: Duration = Duration::from_millis(50);
/// For so long on a CPU, a main thread that runs Python comes to what it is to run. What it has not
/// come to then is lost perhaps, and asked again: each time after twice as long, so many times at
/// most. It may run C code instead, and has room for 32 that wait.
const COMES_IN: Duration = Duration::from_millis(50);
const ASKS: u8 = 10;
/// Behind what is said: whether it is cancelled, and who has made the room for it.
const CANCELLED: u64 = 1;
const OWNER: u64 = 16;

/// A process, and how it is asked.
pub(super) struct Target<'p> {
    process: &'p Process,
    places: &'p Places,
    way: Way<'p>,
    /// Where in its memory it says what came of it.
    said: u64,
    owner: [u8; 16],
    /// What it was last asked to run, and when.
    text: RefCell<String>,
    asked: Cell<Asked>,
    state: Cell<State>,
}

/// Whether it can be asked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Ready,
    /// The page did not come in time.
    Late,
    /// See [`Target::is_stuck`].
    Stuck,
}

#[derive(Clone, Copy, Default)]
struct Asked {
    /// How often it was asked to run anything.
    times: u8,
    /// Of these, of the last text.
    of_this: u8,
    /// Time on a CPU that the main thread had had when that was tried last.
    ran: Duration,
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
            let room = remote.room().ok_or(PythonOutcome::TooMany)?;
            (Way::Remote(remote, RefCell::default()), room)
        } else {
            let page = Page::choose(process, places, &owner)?;
            let room = page.at + ROOM as u64;
            (Way::Page(page), room)
        };
        Ok(Self {
            process,
            places,
            way,
            said,
            owner,
            text: RefCell::default(),
            asked: Cell::default(),
            state: Cell::new(State::Ready),
        })
    }

    /// Asks it to switch its trampoline on. What is done of it already is not done again.
    ///
    /// # Errors
    /// Why it could not be asked. What it does then, [`Target::outcome`] says.
    pub(super) fn switch_on(&self) -> Result<(), PythonOutcome> {
        if let Way::Page(page) = &self.way
            && !page.is_there()
        {
            let mapped = page.map();
            if mapped == Err(PythonOutcome::NoMemory) {
                self.state.set(State::Late);
            }
            self.note(mapped)?;
        }
        self.process.write(&self.owner, self.said.wrapping_add(OWNER))?;
        self.process.write(&[NOTHING, 0, 0], self.said)?;
        self.run(switching_on(self.said, self.process.own_pid()))
    }

    /// Whether a thread of it did not stop, which only the end of this process lets go.
    pub(super) fn is_stuck(&self) -> bool {
        self.state.get() == State::Stuck
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

    /// Undoes all: what is on goes off, and what is to be run is not. [`Target::clean_up`] has what
    /// is left to do then.
    pub(super) fn switch_off(&self, patience: Duration) -> PythonOutcome {
        let deadline = Instant::now() + patience;
        let left = || deadline.saturating_duration_since(Instant::now());
        let mut outcome = self.outcome();
        if outcome.is_none() {
            self.cancel();
            // What has begun before that does not see it.
            in_time(left(), || self.said() != Some(BEGUN));
            outcome = self.outcome();
        }
        let Some(outcome) = outcome else { return PythonOutcome::Waiting };
        if outcome != PythonOutcome::Activated {
            return outcome;
        }
        // For a while, no thread may be where it can be interrupted.
        while let Err(why) = self.run(switching_off(self.said)) {
            if why == PythonOutcome::Ended {
                return outcome;
            }
            if self.is_stuck() || left().is_zero() {
                return PythonOutcome::LeftOn;
            }
            std::thread::sleep(PAUSE);
        }
        let is_off = || self.said().is_none_or(|said| said == OFF);
        if in_time(left(), is_off) { outcome } else { PythonOutcome::LeftOn }
    }

    /// Does what is left to do, as soon as the process lets it, and looks for that each `pause`:
    /// switches off, and gives back the page.
    pub(super) fn clean_up(&self, time: Duration, pause: Duration) {
        let deadline = Instant::now() + time;
        while !self.is_clean() {
            if Instant::now() >= deadline {
                if let Way::Remote(remote, _) = &self.way {
                    // Its file goes with this process. A page stays.
                    remote.cancel();
                }
                return;
            }
            std::thread::sleep(pause);
        }
    }

    /// Does what can be done of it now; whether nothing is left.
    pub(super) fn is_clean(&self) -> bool {
        if self.is_stuck() {
            return true;
        }
        let is_late = self.state.get() == State::Late;
        match self.said() {
            None if is_late => match &self.way {
                Way::Page(page) if !page.is_there() => return self.process.has_ended(self.places),
                _ => {}
            },
            None => return true,
            Some(ASKED | BEGUN) => return false,
            Some(ON) => {
                // What comes of it is seen the next time.
                let _ = self.run(switching_off(self.said));
                return false;
            }
            Some(_) => {}
        }
        let Way::Page(page) = &self.way else {
            // Another capture may have the place.
            let _ = self.process.write(&[0; 16], self.said.wrapping_add(OWNER));
            return true;
        };
        // What is still to be run would read from it.
        let is_read = || self.words().is_some_and(|words| words[2] != self.asked.get().times);
        if !is_late && is_read() {
            return false;
        }
        let done = self.note(page.unmap());
        matches!(done, Ok(()) | Err(PythonOutcome::Ended))
    }

    /// Has the main thread run a text, as soon as it comes to it.
    fn run(&self, text: String) -> Result<(), PythonOutcome> {
        self.text.replace(text);
        self.asked.set(Asked { of_this: 0, ..self.asked.get() });
        self.run_again()
    }

    fn run_again(&self) -> Result<(), PythonOutcome> {
        let [before, ..] = self.words().ok_or(PythonOutcome::Ended)?;
        let text = self.text.borrow();
        // One that was asked already may say what came of it at any moment.
        let is_asked = before == ASKED;
        if !is_asked {
            self.process.write(&[ASKED, 0], self.said)?;
        }
        let asked = match &self.way {
            Way::Page(page) => self
                .process
                .write(&[text.as_bytes(), &[0]].concat(), page.at)
                .and_then(|()| page.run()),
            Way::Remote(remote, kept) => {
                // It has the same name.
                kept.take();
                Script::write(self.process, &self.owner, &text).and_then(|script| {
                    remote.run(&script)?;
                    kept.replace(Some(script));
                    Ok(())
                })
            }
        };
        let Asked { times, of_this, .. } = self.asked.get();
        self.asked.set(Asked {
            times: times.wrapping_add(asked.is_ok().into()),
            of_this: of_this.saturating_add(asked.is_ok().into()),
            // Where it failed, too: its threads are to run on before they are looked at again.
            ran: self.process.main_thread_ran(),
        });
        if asked.is_err() && !is_asked {
            self.process.write(&[before], self.said)?;
        }
        self.note(asked)
    }

    /// Notes when a thread did not stop.
    fn note(&self, done: Result<(), PythonOutcome>) -> Result<(), PythonOutcome> {
        if done == Err(PythonOutcome::Unresponsive) {
            self.state.set(State::Stuck);
        }
        done
    }

    /// Has it run nothing, if it has not begun.
    fn cancel(&self) {
        // It may have ended.
        let _ = self.process.write(&[1], self.said.wrapping_add(CANCELLED));
        if let Way::Remote(remote, _) = &self.way {
            remote.cancel();
            if !in_time(BEGINS_IN, || self.said() != Some(ASKED)) {
                let _ = self.process.write(&[NOTHING], self.said);
            }
        }
    }

    /// What it has said. None: it has ended, or is another program by now. What was cut short, or
    /// is lost perhaps, is asked once more, if it is still wanted.
    fn said(&self) -> Option<u8> {
        match self.words()? {
            [CUT_SHORT, (1..), _] => Some(NOTHING),
            [said @ (CUT_SHORT | ASKED), 0, _] => {
                if said == CUT_SHORT || self.is_lost() {
                    // If it cannot be asked now, it is the next time.
                    let _ = self.run_again();
                }
                Some(ASKED)
            }
            [said, ..] => Some(said),
        }
    }

    fn is_lost(&self) -> bool {
        let Asked { of_this, ran, .. } = self.asked.get();
        let is_forgotten = match &self.way {
            Way::Page(_) => true,
            Way::Remote(remote, _) => !remote.is_pending(),
        };
        (1..ASKS).contains(&of_this)
            && is_forgotten
            && self.process.main_thread_ran() > ran + COMES_IN * (1 << (of_this - 1))
    }

    /// What it has said, whether it is cancelled, and how often it has begun.
    fn words(&self) -> Option<[u8; 3]> {
        let owner = self.process.read(self.said.wrapping_add(OWNER));
        self.process.read(self.said).filter(|_| owner == Some(self.owner))
    }
}
