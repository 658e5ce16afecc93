//! Where the running kernel keeps what the eBPF programs read: offsets from its BTF, since Rust
//! eBPF has no CO-RE. Pure. Called by `object.rs` before it loads them.

use stackwire_collector_ebpf::Config;
use stackwire_collector_ebpf::vma::Layout;

use super::btf::{Btf, BtfError};
use crate::arch;
use crate::host::pid_namespace;

/// The configuration with the offsets of the running kernel, and those of its tree of mappings.
///
/// # Errors
/// See [`BtfError`]; [`BtfError::NoPreviousState`] when it is to be recorded why threads
/// leave their CPU.
pub fn offsets(config: Config, btf: &Btf<'_>) -> Result<(Config, Layout), BtfError> {
    let asks_why = config.wait_states != 0 || config.add_up != 0;
    if asks_why && !has_previous_state(btf)? {
        return Err(BtfError::NoPreviousState);
    }
    let members =
        ["flags", "pid", "tgid", "group_leader", "start_boottime", arch::THREAD_POINTER, "mm"];
    let [flags, pid, tgid, group_leader, start_boottime, thread_pointer, mm] =
        btf.offsets("task_struct", members)?;
    let [policy, runtime_before] = if asks_why {
        btf.offsets("task_struct", ["policy", "se.prev_sum_exec_runtime"])?
    } else {
        [0; 2]
    };
    let [runtime, signal] = btf.offsets("task_struct", ["se.sum_exec_runtime", "signal"])?;
    let [signal_runtime] = btf.offsets("signal_struct", ["sum_sched_runtime"])?;
    let config = match pid_namespace() {
        None => config,
        Some(inode) => in_namespace(config, btf, inode)?,
    };
    let [exec_id] = btf.offsets("task_struct", ["self_exec_id"])?;
    let config = Config {
        task_exec_id: exec_id,
        task_policy: policy,
        task_runtime: runtime,
        task_runtime_before: runtime_before,
        task_signal: signal,
        signal_runtime,
        task_flags: flags,
        task_pid: pid,
        task_tgid: tgid,
        task_group_leader: group_leader,
        task_start_boottime: start_boottime,
        task_thread_pointer: thread_pointer,
        task_mm: mm,
        collector: std::process::id(),
        ..config
    };
    // Kernels older than 6.1 have another tree: mappings are known there when the collector has
    // told them.
    Ok((config, layout(btf).unwrap_or_default()))
}

/// With what it takes to number tasks as another pid namespace than the initial one does.
fn in_namespace(config: Config, btf: &Btf<'_>, inode: u32) -> Result<Config, BtfError> {
    let [task_thread_pid] = btf.offsets("task_struct", ["thread_pid"])?;
    let [pid_level, pid_numbers] = btf.offsets("pid", ["level", "numbers"])?;
    let [upid_ns] = btf.offsets("upid", ["ns"])?;
    let [namespace_inode] = btf.offsets("pid_namespace", ["ns.inum"])?;
    let pid_namespace = inode;
    Ok(Config {
        pid_namespace,
        task_thread_pid,
        pid_level,
        pid_numbers,
        upid_ns,
        namespace_inode,
        ..config
    })
}

/// Whether the tracepoint `sched_switch` says what the previous thread's state is: its programs get
/// a pointer, then `preempt`, `prev`, `next` and, since 5.18, `prev_state`.
fn has_previous_state(btf: &Btf<'_>) -> Result<bool, BtfError> {
    Ok(btf.parameters("btf_trace_sched_switch")? >= 5)
}

fn layout(btf: &Btf<'_>) -> Result<Layout, BtfError> {
    // Nodes as they are known, or none at all.
    let known = btf.offsets("maple_range_64", ["pivot", "slot"])? == [8, 128]
        && btf.offsets("maple_arange_64", ["pivot", "slot"])? == [8, 80];
    if !known {
        return Ok(Layout::default());
    }
    let [mm_root] = btf.offsets("mm_struct", ["mm_mt.ma_root"])?;
    // Without it the vDSO of brief processes is unknown, no more.
    let [mm_vdso] = btf.offsets("mm_struct", ["context.vdso"]).unwrap_or_default();
    let members = ["vm_start", "vm_end", "vm_mm", "vm_flags", "vm_pgoff", "vm_file"];
    let [vma_start, vma_end, vma_mm, vma_flags, vma_page, vma_file] =
        btf.offsets("vm_area_struct", members)?;
    let [file_inode] = btf.offsets("file", ["f_inode"])?;
    let [inode_number, inode_device, inode_size, inode_generation] =
        btf.offsets("inode", ["i_ino", "i_sb", "i_size", "i_generation"])?;
    // Since 6.11; since 6.6; before that.
    let [inode_seconds, inode_nanoseconds] = btf
        .offsets("inode", ["i_ctime_sec", "i_ctime_nsec"])
        .or_else(|_| btf.offsets("inode", ["__i_ctime.tv_sec", "__i_ctime.tv_nsec"]))
        .or_else(|_| btf.offsets("inode", ["i_ctime.tv_sec", "i_ctime.tv_nsec"]))?;
    let [device_number, device_magic] = btf.offsets("super_block", ["s_dev", "s_magic"])?;
    let [task_cred, task_files] = btf.offsets("task_struct", ["cred", "files"])?;
    let [cred_saved] = btf.offsets("cred", ["suid"])?;
    let [files_table] = btf.offsets("files_struct", ["fdt"])?;
    let [table_files] = btf.offsets("fdtable", ["fd"])?;
    Ok(Layout {
        mm_root,
        mm_vdso,
        vma_start,
        vma_end,
        vma_mm,
        vma_flags,
        vma_page,
        vma_file,
        file_inode,
        inode_number,
        inode_device,
        inode_seconds,
        inode_nanoseconds,
        inode_size,
        inode_generation,
        device_number,
        device_magic,
        task_cred,
        task_files,
        cred_saved,
        files_table,
        table_files,
        reserved: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::BTF_PATH;

    #[test]
    fn the_running_kernel_numbers_tasks_by_namespace() {
        let Ok(bytes) = std::fs::read(BTF_PATH) else { return };
        let btf = Btf::new(&bytes).unwrap();
        let found = in_namespace(Config::default(), &btf, 7).unwrap();
        assert!(found.task_thread_pid > 0 && found.pid_numbers > 0, "{found:?}");
        assert_eq!((found.pid_namespace, found.upid_ns), (7, 8));
    }

    #[test]
    fn the_running_kernel_has_a_tree_that_is_known() {
        let Ok(bytes) = std::fs::read(BTF_PATH) else { return };
        let btf = Btf::new(&bytes).unwrap();
        // Kernels older than 6.1 have none.
        if btf.offsets("maple_range_64", ["pivot"]).is_ok() {
            let found = layout(&btf).unwrap();
            assert!(found.mm_root > 0 && found.mm_vdso > 0, "{found:?}");
        }
    }
}
