//! Real file systems on images and on recorded devices.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::context::Fallible;
use crate::process::must;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ext4,
    Xfs,
    Btrfs,
}

impl Kind {
    pub(crate) const ALL: [Kind; 3] = [Kind::Ext4, Kind::Xfs, Kind::Btrfs];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Ext4 => "ext4",
            Kind::Xfs => "xfs",
            Kind::Btrfs => "btrfs",
        }
    }

    pub(crate) fn mkfs(self) -> &'static str {
        match self {
            Kind::Ext4 => "mkfs.ext4",
            Kind::Xfs => "mkfs.xfs",
            Kind::Btrfs => "mkfs.btrfs",
        }
    }

    /// Little more than the smallest size that the file system accepts.
    fn bytes(self) -> u64 {
        const MIB: u64 = 1024 * 1024;
        match self {
            Kind::Ext4 => 96 * MIB,
            Kind::Xfs => 320 * MIB,
            Kind::Btrfs => 192 * MIB,
        }
    }

    /// Makes an image with an empty file system of this kind.
    pub(crate) fn make(self, image: &Path) -> Fallible<()> {
        File::create(image)?.set_len(self.bytes())?;
        let force = if self == Kind::Ext4 { "-F" } else { "-f" };
        must(self.mkfs(), &["-q", force, text(image)?])?;
        Ok(())
    }
}

/// A mounted file system; unmounted when dropped.
pub(crate) struct Mounted {
    point: PathBuf,
    /// Detached after the unmount, if it does not go by itself.
    device: Option<String>,
    is_mounted: bool,
}

impl Mounted {
    /// Mounts an image: the file system recovers what it finds.
    pub(crate) fn image(kind: Kind, image: &Path, point: &Path) -> Fallible<Self> {
        std::fs::create_dir_all(point)?;
        must(
            "mount",
            &["-t", kind.name(), "-o", "loop", text(image)?, text(point)?],
        )?;
        Ok(Mounted {
            point: point.to_owned(),
            device: None,
            is_mounted: true,
        })
    }

    /// Mounts a file, such as one of a recorded device, over a loop device that stays.
    pub(crate) fn file(kind: Kind, file: &Path, point: &Path) -> Fallible<Self> {
        std::fs::create_dir_all(point)?;
        let device = must("losetup", &["-f", "--show", text(file)?])?;
        let mut mounted = Mounted {
            point: point.to_owned(),
            device: Some(device),
            is_mounted: false,
        };
        mounted.mount(kind)?;
        Ok(mounted)
    }

    /// Mounts again after [`Mounted::unmount`]: nothing is left in the cache.
    pub(crate) fn mount(&mut self, kind: Kind) -> Fallible<()> {
        let device = self.device.as_deref().ok_or("nothing to mount")?;
        must("mount", &["-t", kind.name(), device, text(&self.point)?])?;
        self.is_mounted = true;
        Ok(())
    }

    pub(crate) fn unmount(&mut self) -> Fallible<()> {
        must("umount", &[text(&self.point)?])?;
        self.is_mounted = false;
        Ok(())
    }

    pub(crate) fn point(&self) -> &Path {
        &self.point
    }

    /// Unmounts and detaches, and says so when it does not work.
    pub(crate) fn end(mut self) -> Fallible<()> {
        if self.is_mounted {
            self.unmount()?;
        }
        if let Some(device) = self.device.take() {
            must("losetup", &["-d", &device])?;
        }
        Ok(())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // On the way out after a failure; the guard finishes what does not work here.
        if self.is_mounted {
            self.unmount().unwrap_or_default();
        }
        if let Some(device) = self.device.take() {
            drop(must("losetup", &["-d", &device]));
        }
    }
}

pub(crate) fn text(path: &Path) -> Fallible<&str> {
    path.to_str()
        .ok_or_else(|| format!("not Unicode: {}", path.display()).into())
}
