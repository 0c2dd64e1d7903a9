//! What the layers on real file systems stand on: a device that keeps a record of everything
//! that reaches it, volumes on top of it, crash images made of the record, and the guard that
//! leaves no mount behind.

pub(crate) mod crash;
pub(crate) mod device;
pub(crate) mod guard;
pub(crate) mod random;
pub(crate) mod subject;
pub(crate) mod volume;

use std::path::Path;

use crate::context::Context;
use crate::process::has;

/// The file systems that a layer can use; prints why not, for the others.
pub(crate) fn file_systems(context: &Context, layer: &str) -> Vec<volume::Kind> {
    let chosen = context.file_system.as_deref();
    let asked = volume::Kind::ALL
        .into_iter()
        .filter(|kind| chosen.is_none_or(|c| c == kind.name()));
    let can = asked.filter(|kind| match missing(*kind) {
        Some(reason) => {
            println!("SKIPPED {layer} on {}: {reason}", kind.name());
            false
        }
        None => true,
    });
    can.collect()
}

/// Says what this machine lacks for a file system on a recorded device.
fn missing(kind: volume::Kind) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root".to_owned());
    }
    if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
        return Some("needs /dev/fuse and /dev/loop-control".to_owned());
    }
    let programs = [
        "mount",
        "umount",
        "losetup",
        "fusermount3",
        "cp",
        kind.mkfs(),
    ];
    let absent = programs.into_iter().find(|program| !has(program));
    absent.map(|program| format!("needs {program}"))
}
