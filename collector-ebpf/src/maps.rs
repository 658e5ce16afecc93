//! The maps and the one load-time global. Created once at their final size: nothing is added at run
//! time.

use core::ffi::c_void;

use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP, BPF_RB_NO_WAKEUP};
use aya_ebpf::helpers::generated::bpf_ringbuf_output;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, PerCpuArray, ProgramArray, RingBuf};
use stackwire_collector_ebpf::frame::TableWalk;
use stackwire_collector_ebpf::managed::{
    CodeHead, Entry, KNOWN_CODES, LAYOUTS, MAX_ENTRIES, MAX_EVALUATORS, MAX_NEW, ManagedHead,
    PIECE, SCRIPTS, ScriptHead,
};
use stackwire_collector_ebpf::tables::{self, CHUNK, CHUNKS, Executable, Mapping};
use stackwire_collector_ebpf::vma::{self, FILES, FileKey, Layout, Node, Question};
use stackwire_collector_ebpf::{
    COUNTERS_PER_CPU, Config, CopyHead, Counter, MAX_COPY_BYTES, MAX_CPUS, MAX_EVENTS,
    MAX_KERNEL_FRAMES, MAX_TARGETS, MAX_USER_FRAMES, MAX_WAITING, Picker, RING_BYTES, SampleHeader,
    TOLD_STACKS, Waiting, Waker,
};
use stackwire_collector_ebpf::{Rule, cpython, ruby, v8};

/// Where a record is put together before it is copied to the ring: too large for the BPF stack.
#[repr(C)]
pub struct Scratch {
    pub header: SampleHeader,
    pub frames: [u64; MAX_USER_FRAMES + MAX_KERNEL_FRAMES + 1],
    /// Not part of the record: where the walk stands between two programs.
    pub walk: Walk,
    /// Likewise, for a walk by tables.
    pub tables: TableWalk,
    /// Likewise: what it read, and what it is known by.
    pub reads: Reads,
    pub key: u64,
    /// Likewise: which thread is being woken, and which wait of it ends.
    pub woken: Ends,
    /// Likewise: what the native walk has to do with an interpreter's list of frames.
    pub list: OfList,
    /// Likewise: frame pointers of the frames that were left by them; 0: of others.
    pub pointers: [u64; MAX_USER_FRAMES],
}

/// What a walk by tables knows of the list of frames of an interpreter.
#[repr(C)]
pub struct OfList {
    /// One of [`list`].
    pub stage: u64,
    /// Number of the layout.
    pub layout: u64,
    /// Where the first byte of its file would be.
    pub base: u64,
    /// Address, stack pointer and number of the native frame that was its first.
    pub ip: u64,
    pub sp: u64,
    pub native: u64,
    /// An address in the stack frame of the next evaluator, or `managed::ANY`; 0: there is none.
    pub evaluator: u64,
    /// With `managed::ANY`: whether the core of an evaluator was met just now.
    pub after_core: u64,
}

impl OfList {
    /// Whether the list is to be walked now. `walk_frame` finds that out in a reference of its own:
    /// a plain read would be taken for what was read before.
    #[inline(always)]
    pub fn is_wanted(&self) -> bool {
        // SAFETY: a plain word of this structure.
        unsafe { core::ptr::read_volatile(&raw const self.stage) == list::WANTED }
    }

    /// Whether the walk of the list is over.
    #[inline(always)]
    pub fn was_walked(&self) -> bool {
        self.stage == list::WALKED || self.stage == list::NOT_THERE
    }
}

/// Stages of [`OfList`].
pub mod list {
    /// No code of an interpreter was met.
    pub const NOT_MET: u64 = 0;
    /// The list is to be walked now.
    pub const WANTED: u64 = 1;
    /// It is being walked.
    pub const WALKING: u64 = 2;
    /// It has been walked.
    pub const WALKED: u64 = 3;
    /// It is not walked by this program.
    pub const NONE: u64 = 4;
    /// The thread has none, or was not found.
    pub const NOT_THERE: u64 = 5;
    /// Code of V8 was met: its frames are looked at when the native walk is over.
    pub const LATER: u64 = 6;
}

/// Scripts that a sample may begin to hand over, a power of two.
pub const MAX_WANTED: usize = 8;
/// Interpreters of which a thread may run functions inside each other, a power of two.
pub const MAX_LISTS: usize = 4;

/// Where lists of frames are put together.
#[repr(C)]
pub struct List {
    pub header: SampleHeader,
    pub head: ManagedHead,
    pub entries: [Entry; MAX_ENTRIES],
    /// Not part of the record, as all below: the layout and where the file would begin.
    pub layout: u64,
    pub base: u64,
    /// Of the thread, and the start of its process.
    pub thread_pointer: u64,
    pub tid: u64,
    pub start: u64,
    /// Looked at now, and how many threads were.
    pub interpreter: u64,
    pub thread: u64,
    pub looked_at: u64,
    /// Non-zero: the thread is found.
    pub is_found: u64,
    /// The next frame; the next evaluator's `_PyCFrame` (CPython); the end of all frames (Ruby). Of
    /// V8: what the function shares with others, and the frame pointer.
    pub frame: u64,
    pub c_frame: u64,
    pub end_of_frames: u64,
    /// Number of entries, and of evaluators.
    pub count: u64,
    pub evaluators: u64,
    /// Number of lists that have been begun: a thread has one in each interpreter that it runs.
    pub lists: u64,
    /// Of each, the next evaluator that the native walk will come by, and behind its last.
    pub next: [u64; MAX_LISTS],
    pub ends: [u64; MAX_LISTS],
    /// Non-zero: the process has one interpreter.
    pub is_single: u64,
    /// `managed::ANY` where evaluators are known by their code.
    pub any: u64,
    /// Entries of evaluators.
    pub at: [u64; MAX_EVALUATORS],
    /// Of V8: where the function is.
    pub position: u32,
    /// Likewise: the strings of a name and of a path, and what was found of the one looked at last.
    pub text: u64,
    pub path: u64,
    pub source: u64,
    pub characters: Characters,
    /// Likewise: the table of its positions, and bytes of that.
    pub table: u64,
    pub table_bytes: u64,
    /// Likewise: scripts to hand over, how many, and the one looked at last.
    pub scripts: [u64; MAX_WANTED],
    pub wanted: u64,
    pub last_script: u64,
    /// Functions to hand over.
    pub new: u64,
    pub news: [Entry; MAX_NEW],
    /// What was read last: of 256 bytes at most, from each of which a word may be taken.
    pub bytes: [u8; 264],
}

/// Where the characters of a string are.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Characters {
    pub at: u64,
    /// Bytes that lie there, and bytes of all of the string.
    pub bytes: u64,
    pub length: u64,
    /// Bytes of a character.
    pub width: u32,
}

/// Where a piece of a script's source is put together.
#[repr(C)]
pub struct Piece {
    pub header: SampleHeader,
    pub head: ScriptHead,
    /// More than are copied: the verifier knows less of lengths.
    pub bytes: [u8; 2 * PIECE],
    /// Until when this CPU has used up its share of pieces, `CLOCK_MONOTONIC` nanoseconds.
    pub until_ns: u64,
}

/// As [`LISTS`].
#[map]
pub static PIECES: PerCpuArray<Piece> = PerCpuArray::with_max_entries(2, 0);
/// How much of the source of a script was handed over: which script, and bytes.
#[map]
pub static HANDED_OVER: Array<[u64; 2]> = Array::with_max_entries(SCRIPTS, BPF_F_MMAPABLE);

/// By slot, of those that walk lists: as in `SCRATCH`.
#[map]
pub static LISTS: PerCpuArray<List> = PerCpuArray::with_max_entries(2, 0);

/// Where the record of what names a function is put together.
#[repr(C)]
pub struct Code {
    pub header: SampleHeader,
    pub head: CodeHead,
    pub bytes: [u8; CODE_ROOM],
}
/// More than there are: the verifier knows less of lengths.
pub const CODE_ROOM: usize = 4096 + 8192;

#[map]
pub static CODES: PerCpuArray<Code> = PerCpuArray::with_max_entries(2, 0);
/// Functions that were handed over, see `managed::known_word`.
#[map]
pub static KNOWN: Array<u64> = Array::with_max_entries(KNOWN_CODES, BPF_F_MMAPABLE);
/// Where a thread's state was found last, by thread: process start mixed with the thread id, and
/// the address.
#[map]
pub static THREADS: Array<[u64; 2]> = Array::with_max_entries(THREAD_SLOTS, 0);
/// Of processes that run code of an interpreter: which, the number of its layout, and where the
/// first byte of its file would be.
#[map]
pub static MET: Array<[u64; 3]> = Array::with_max_entries(THREAD_SLOTS, 0);
/// A power of two.
pub const THREAD_SLOTS: u32 = 1 << 12;
/// Layouts of CPython by number. Written by the collector, through mmap.
#[map]
pub static PYTHON_LAYOUTS: Array<cpython::Layout> =
    Array::with_max_entries(LAYOUTS, BPF_F_MMAPABLE);
/// Likewise, of Ruby.
#[map]
pub static RUBY_LAYOUTS: Array<ruby::Layout> = Array::with_max_entries(LAYOUTS, BPF_F_MMAPABLE);
/// Likewise, of V8.
#[map]
pub static V8_LAYOUTS: Array<v8::Layout> = Array::with_max_entries(LAYOUTS, BPF_F_MMAPABLE);

/// Words of a process's memory that a walk by tables came by.
#[repr(C)]
pub struct Reads {
    /// How many; more than [`MAX_READS`]: too many, or the walk depends on more than them.
    pub count: u64,
    pub at: [u64; MAX_READS],
    pub found: [u64; MAX_READS],
}

/// A walk of two words a frame is at most half as deep.
pub const MAX_READS: usize = 32;

/// A stack that was walked on this CPU. While memory has the same words, the same walk gives it.
#[repr(C)]
pub struct Remembered {
    /// Of the process and the registers it begins with.
    pub key: u64,
    /// First mapping and number of mappings of the process.
    pub first: u32,
    pub mappings: u32,
    /// Of the tables.
    pub generation: u64,
    /// Of the stack.
    pub number: u64,
    pub reads: Reads,
}

/// A power of two: 70 KiB on each CPU.
pub const REMEMBERED_STACKS: u32 = 128;

/// By the key. The collector makes it smaller where waits are not recorded.
#[map]
pub static REMEMBERED: PerCpuArray<Remembered> =
    PerCpuArray::with_max_entries(REMEMBERED_STACKS, 0);

/// A wait that is about to end.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Ends {
    pub since_ns: u64,
    pub tid: u32,
}

/// A walk of a user stack, half done.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Walk {
    /// The next frame pointer to follow.
    pub fp: u64,
    /// The lowest address it may have.
    pub lowest: u64,
    /// Frames found.
    pub depth: u64,
    /// [`UserEnd`](stackwire_collector_ebpf::UserEnd) as a number once it is over, else
    /// [`WALKING`].
    pub end: u64,
}

/// There may be more frames.
pub const WALKING: u64 = u64::MAX;

const BPF_F_MMAPABLE: u32 = 1 << 10;

#[map]
pub static SAMPLES: RingBuf = RingBuf::with_byte_size(RING_BYTES, 0);

/// By CPU and event: of events that are counted one by one, which become samples. The collector
/// reads it through mmap.
#[map]
pub static PICKERS: Array<Picker> =
    Array::with_max_entries(MAX_CPUS * MAX_EVENTS as u32, BPF_F_MMAPABLE);

/// Wakes the collector: its entries are empty and thrown away. A full one still wakes.
#[map]
pub static WAKEUPS: RingBuf = RingBuf::with_byte_size(4096, 0);

/// What programs of events call, and what those call in turn: see `sources/perf_event.rs`.
#[map]
pub static STAGES: ProgramArray = ProgramArray::with_max_entries(5, 0);

/// Likewise for `sources/off_cpu.rs`: a map holds programs of one type.
#[map]
pub static WAIT_STAGES: ProgramArray = ProgramArray::with_max_entries(3, 0);

/// Likewise for `sources/wakers.rs`.
#[map]
pub static WAKER_STAGES: ProgramArray = ProgramArray::with_max_entries(1, 0);

/// One for each kind of program that takes stacks: they interrupt each other.
#[map]
pub static SCRATCH: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(4, 0);
/// The slot of programs of perf events.
pub const SAMPLER: u32 = 0;
/// The slot of programs at a switch to another thread.
pub const SWITCHER: u32 = 1;
/// The slot of answers to the collector.
pub const ANSWERS: u32 = 2;
/// The slot of programs at a wake-up.
pub const WAKER: u32 = 3;

/// Where a copy of a stack is put together, by the program in whose slot of `SCRATCH` the walk is.
#[repr(C)]
pub struct Copied {
    pub header: SampleHeader,
    pub head: CopyHead,
    /// More than are copied: the verifier does not know that the last piece is not as long as it
    /// could be.
    pub bytes: [u8; MAX_COPY_BYTES + 2 * PAGE],
    /// Until when this CPU has used up its share of copies of waits' stacks, `CLOCK_MONOTONIC`
    /// nanoseconds.
    pub until_ns: u64,
}
/// Bytes of a page.
pub const PAGE: usize = 4096;

#[map]
pub static COPIES: PerCpuArray<Copied> = PerCpuArray::with_max_entries(2, 0);
/// Most bytes of a stack that are copied now, by slot of `SCRATCH`. Written by the collector,
/// through mmap.
#[map]
pub static COPY_BYTES: Array<u64> = Array::with_max_entries(2, BPF_F_MMAPABLE);

/// By thread id. The collector makes it smaller where waits are not recorded.
#[map]
pub static WAITING: HashMap<u32, Waiting> = HashMap::with_max_entries(MAX_WAITING, 0);
/// Who woke a thread last, by its id. The collector makes it smaller where that is not recorded.
#[map]
pub static WAKERS: HashMap<u32, Waker> = HashMap::with_max_entries(MAX_WAITING, 0);
/// Numbers of stacks that the collector was told of, each in the place that its bits from
/// the ninth on name.
#[map]
pub static TOLD: Array<u64> = Array::with_max_entries(TOLD_STACKS, BPF_F_MMAPABLE);

/// Mapped by the collector, so that it reads them with no capability and no system call.
#[map]
pub static COUNTERS: Array<u64> =
    Array::with_max_entries(MAX_CPUS * COUNTERS_PER_CPU, BPF_F_MMAPABLE);

/// Process id → start time of the process in boottime nanoseconds (0 = any), so that a pid used
/// again by a stranger is not taken for ours.
#[map]
pub static TARGETS: HashMap<u32, u64> = HashMap::with_max_entries(MAX_TARGETS, 0);

/// Unwind tables, see `walk/tables.rs`. Written by the collector, through mmap.
#[map]
pub static PROCESSES: Array<tables::Process> =
    Array::with_max_entries(tables::PROCESS_SLOTS, BPF_F_MMAPABLE);
#[map]
pub static MAPPINGS: Array<Mapping> = Array::with_max_entries(tables::MAPPINGS, BPF_F_MMAPABLE);
#[map]
pub static EXECUTABLES: Array<Executable> =
    Array::with_max_entries(tables::EXECUTABLES, BPF_F_MMAPABLE);
#[map]
pub static PAGES: Array<u64> = Array::with_max_entries(tables::PAGES, BPF_F_MMAPABLE);
#[map]
pub static ROWS: Array<[u32; CHUNK as usize]> = Array::with_max_entries(CHUNKS, BPF_F_MMAPABLE);
#[map]
pub static RULES: Array<Rule> = Array::with_max_entries(tables::RULES, BPF_F_MMAPABLE);
/// The last exec of a process with this first slot, see `tables::exec_word`. Written here.
#[map]
pub static EXECS: Array<u64> = Array::with_max_entries(tables::PROCESS_SLOTS, 0);
/// Children by their first slot. Written here.
#[map]
pub static INHERITED: Array<tables::Inherited> = Array::with_max_entries(tables::PROCESS_SLOTS, 0);
/// Counts up before anything in them is used again for something else.
#[map]
pub static GENERATION: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Files whose executables have numbers. Written by the collector, through mmap.
#[map]
pub static KNOWN_FILES: Array<vma::File> = Array::with_max_entries(FILES, BPF_F_MMAPABLE);
#[map]
pub static QUESTION: Array<Question> = Array::with_max_entries(1, BPF_F_MMAPABLE);
/// Room to search the kernel's tree of mappings.
#[repr(C)]
pub struct Search {
    pub node: Node,
    pub at: u64,
    pub found: Vma,
    /// What was found, as the tables have it.
    pub mapping: Mapping,
}

/// A mapping, as the kernel has it.
#[repr(C)]
pub struct Vma {
    pub start: u64,
    pub end: u64,
    pub page: u64,
    pub flags: u64,
    pub key: FileKey,
}

/// Room to search the kernel's tree of mappings: as in `SCRATCH`, and that of answers to the
/// collector.
#[map]
pub static SEARCH: PerCpuArray<Search> = PerCpuArray::with_max_entries(4, 0);

#[unsafe(no_mangle)]
pub static LAYOUT: Layout = Layout {
    mm_root: 0,
    mm_vdso: 0,
    vma_start: 0,
    vma_end: 0,
    vma_mm: 0,
    vma_flags: 0,
    vma_page: 0,
    vma_file: 0,
    file_inode: 0,
    inode_number: 0,
    inode_device: 0,
    inode_seconds: 0,
    inode_nanoseconds: 0,
    inode_size: 0,
    inode_generation: 0,
    device_number: 0,
    device_magic: 0,
    task_cred: 0,
    task_files: 0,
    cred_saved: 0,
    files_table: 0,
    table_files: 0,
    reserved: 0,
};

#[unsafe(no_mangle)]
static CONFIG: Config = Config {
    cgroup_id: 0,
    scope: 0,
    cgroup_level: 0,
    kernel_stacks: 0,
    task_flags: 0,
    task_pid: 0,
    task_tgid: 0,
    task_group_leader: 0,
    task_start_boottime: 0,
    unwind: 0,
    task_thread_pointer: 0,
    task_mm: 0,
    collector: 0,
    counted: 0,
    interval_ns: 0,
    wait_threshold_ns: 0,
    wait_states: 0,
    wait_event: 0,
    add_up: 0,
    counters: 0,
    wakers: 0,
    task_policy: 0,
    task_runtime: 0,
    task_runtime_before: 0,
    task_exec_id: 0,
    pid_namespace: 0,
    task_thread_pid: 0,
    pid_level: 0,
    pid_numbers: 0,
    upid_ns: 0,
    namespace_inode: 0,
    stack_copies: 0,
    managed: 0,
    task_signal: 0,
    signal_runtime: 0,
};

/// The configuration the collector wrote before load.
#[inline(always)]
pub fn config() -> Config {
    // SAFETY: a static of plain integers; volatile because the loader, not this code, writes it.
    unsafe { core::ptr::read_volatile(&CONFIG) }
}

/// Wakes the collector, which then reads the side-band events: once, until it has looked.
#[inline(always)]
pub fn wake_collector() {
    if let Some(entry) = WAKEUPS.reserve::<u64>(0) {
        entry.discard(0);
    }
}

/// Copies a record into the ring; false: there was no room.
///
/// # Safety
/// `record` has this many bytes.
#[inline(always)]
pub unsafe fn hand_over(record: *mut c_void, bytes: usize) -> bool {
    // Wake the collector only when a quarter of the ring is full; it looks by itself every tick.
    let waiting = SAMPLES.query(BPF_RB_AVAIL_DATA as u64);
    let wakeup =
        if waiting > u64::from(RING_BYTES / 4) { BPF_RB_FORCE_WAKEUP } else { BPF_RB_NO_WAKEUP };
    let ring = (&raw const SAMPLES).cast_mut().cast();
    // SAFETY: as the caller promises.
    unsafe { bpf_ringbuf_output(ring, record, bytes as u64, u64::from(wakeup)) == 0 }
}

/// Adds one to `counter` of `cpu`.
#[inline(always)]
pub fn count(cpu: u32, counter: Counter) {
    add(cpu, counter, 1);
}

/// Adds to `counter` of `cpu`. Not atomic: a slot belongs to one CPU and one program.
#[inline(always)]
pub fn add(cpu: u32, counter: Counter, some: u64) {
    let row = if cpu < MAX_CPUS { cpu } else { MAX_CPUS - 1 };
    if let Some(slot) = COUNTERS.get_ptr_mut(row * COUNTERS_PER_CPU + counter as u32) {
        // SAFETY: the pointer came from a successful lookup in an array of u64.
        unsafe { *slot += some };
    }
}
