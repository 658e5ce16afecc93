//! What a Python process is made to run: Python that switches its perf trampoline on or off, and
//! writes to its own memory what came of it. Pure. `target.rs` has it run.
//!
//! Handlers of signals run between any two instructions of it, and one that raises an exception
//! cuts it short. The exception would be lost, so the signal is sent once more, a millisecond
//! later, and the handler runs a second time. What was cut short begins again, up to nine times; a
//! text that has not come to its beginning says so, and `target.rs` has it run once more. All of it
//! may be done twice.
//!
//! Not caught: what a handler raises for a signal that comes while the outermost text is compiled,
//! a third of a millisecond. The program then sees `SystemError`, as CPython has it of a pending
//! call that failed, or ends at once if that was `SystemExit`, and nothing is run. A text that is
//! shorter has to be read from somewhere, which takes longer.

/// What it says. Nothing is to run, or what was to run has seen that it was cancelled.
pub(super) const NOTHING: u8 = 7;
/// A handler of a signal has cut it short before it came to its beginning.
pub(super) const CUT_SHORT: u8 = 8;
/// It is still to run.
pub(super) const ASKED: u8 = 0;
/// It runs.
pub(super) const BEGUN: u8 = 6;
/// The trampoline is on.
pub(super) const ON: u8 = 1;
/// It was on before.
pub(super) const WAS_ON: u8 = 2;
/// The interpreter refused.
pub(super) const REFUSED: u8 = 3;
/// It is off, or another capture wants it on.
pub(super) const OFF: u8 = 4;
/// It was on once, and must not be again.
pub(super) const SPENT: u8 = 5;
/// Bytes that a text may have, with its end.
pub(super) const ROOM: usize = 3072;

/// Sends the signal again whose handler has raised `e`: its number is the first that is one among
/// the arguments of the handler, the first two or those behind a star. One that has forgotten its
/// number is not found. Frames of ours are told by their module.
///
/// By another thread and later, so that it does not come here once more. `interrupt_main()` would
/// not end a system call that the main thread has begun meanwhile; a signal whose handler is gone
/// by then would end the program. Not by `pthread_kill()`: what gevent says is the main thread is
/// an object of Python.
const AGAIN: &str = "\
import _signal,_thread,posix,time
def again(e):
 t=e.__traceback__.tb_next
 while t and t.tb_frame.f_globals.get('__name__')=='_stackwire':t=t.tb_next
 n=2 if isinstance(e,KeyboardInterrupt) else 0
 if t:
  l,c=t.tb_frame.f_locals,t.tb_frame.f_code
  k=c.co_argcount
  v=[l.get(i) for i in c.co_varnames[:min(k,2)]]
  if c.co_flags&4:v+=l.get(c.co_varnames[k+c.co_kwonlyargcount])or()
  n=next((i for i in v if isinstance(i,int) and i is not True and 0<i<65),n)
 def send():
  time.sleep(.001)
  if callable(_signal.getsignal(n)):posix.kill(posix.getpid(),n)
 try:n and _thread.start_new_thread(send,())
 except RuntimeError:pass
";

/// A text that switches it on, in the process with that number as it has it: a child may be forked
/// while it is still to run. Writes what came of it to `said`; cancelled, if the byte behind that
/// is not zero when it begins. In the byte behind that it counts how often it began.
///
/// It leaves a mark: the process, and which captures want it on. Children that are forked have
/// inherited mark and trampoline: there none of them counts. Without a mark, it was on before.
pub(super) fn switching_on(said: u64, pid: i32) -> String {
    let does = format!(
        "   a=sys.is_stack_trampoline_active
   p=getpid()
   s=getattr(sys,'_stackwire',None)
   w=s[1] if s and s[0]==p and a() else ()
   if p!={pid} or c and {said} not in w:o={NOTHING}
   elif a() and not s:o={WAS_ON}
   elif s==0:o={SPENT}
   elif i<8 or a():
    sys._stackwire=p,{{*w,{said}}}
    a() or sys.activate_stack_trampoline('perf')
    o={ON}
   else:
    o={REFUSED}
    sys.__dict__.pop('_stackwire',None)
"
    );
    text(said, &does)
}

/// A text that switches it off, if no other capture wants it on.
///
/// From 3.13.12 and 3.14.3 on, each time it is switched on leaves one more watcher of code objects,
/// all of which give a trampoline back that is used once, so that one in use is freed and the
/// program crashes (python/cpython issue 146522). There the mark stays, to say so.
pub(super) fn switching_off(said: u64) -> String {
    let does = format!(
        "   o={OFF}
   s=getattr(sys,'_stackwire',0)
   if s:
    w=s[1]-{{{said}}} if s[0]==getpid() else 0
    if w:sys._stackwire=s[0],w
    else:
     sys.deactivate_stack_trampoline()
     v=sys.version_info[:3]
     if v>=(3,14,3) or (3,13,12)<=v<(3,14):sys._stackwire=0
     else:sys.__dict__.pop('_stackwire',None)
"
    );
    text(said, &does)
}

/// It says that it has begun before it looks whether it was cancelled, and who cancels looks
/// whether it has begun after that: one of them sees the other. What cannot write to its memory
/// does nothing. In the module that it runs in, it leaves no name.
fn text(said: u64, does: &str) -> String {
    let run = format!(
        "{AGAIN}import sys
from posix import getpid
for i in range(9):
 try:
  with open('/proc/self/mem','r+b',0) as m:
   m.seek({said})
   m.write(bytes([{BEGUN}]))
   c,n=m.read(2)
   m.seek({said}+2)
   i or m.write(bytes([n+1&255]))
{does}   m.seek({said})
   m.write(bytes([o]))
  break
 except BaseException as e:again(e)
"
    );
    let cut_short = format!(
        "{AGAIN}again(__import__('sys').exception())
with open('/proc/self/mem','r+b',0) as m:
 m.seek({said})
 o,c,n=m.read(3)
 if o in({ASKED},{BEGUN}):
  m.seek({said})
  m.write(bytes([{CUT_SHORT},c,n+(o=={ASKED})&255]))
"
    );
    let [run, cut_short] = [run, cut_short].map(|it| {
        let literal = it.replace('\n', "\\n");
        format!("__import__('builtins').exec(\"{literal}\",{{'__name__':'_stackwire'}})")
    });
    format!("try:{run}\nexcept BaseException:\n try:{cut_short}\n except BaseException:pass\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_literals_of_python_and_fit() {
        for text in [switching_on(u64::MAX, i32::MAX), switching_off(u64::MAX)] {
            assert!(text.matches('"').count() == 4 && text.lines().count() == 4, "{text}");
            assert!(text.matches('\\').count() == text.matches("\\n").count(), "{text}");
            assert!(text.len() < ROOM, "{}", text.len());
            // The one may still be read when the other is written over it.
            assert!(text.len() <= switching_on(u64::MAX, i32::MAX).len());
        }
    }
}
