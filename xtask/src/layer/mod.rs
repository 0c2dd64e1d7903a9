//! The layers, in the order of `rel all`. Each is a module with one entry function.

mod block;
mod cargo;
mod clock;
mod conc;
mod cover;
mod fsyncfail;
mod fuzz;
pub(crate) mod instructions;
mod kill;
mod mem;
mod model;
mod mutants;
mod peers;
mod res;
mod rot;
mod sim;
mod switched;
mod syncs;
mod syscalls;

use crate::context::{Context, Fallible, Outcome};

pub(crate) struct Layer {
    pub(crate) name: &'static str,
    /// What it answers, for `rel list`.
    pub(crate) question: &'static str,
    /// Part of `rel all`.
    pub(crate) in_all: bool,
    pub(crate) run: fn(&Context) -> Fallible<Outcome>,
}

pub(crate) const LAYERS: &[Layer] = &[
    Layer {
        name: "model",
        question: "do random calls, clock steps, kills and reopens agree with the oracle?",
        in_all: true,
        run: model::run,
    },
    Layer {
        name: "sim",
        question: "crashes and power cuts at every step on the simulated disk: allowed answers?",
        in_all: true,
        run: sim::run,
    },
    Layer {
        name: "rot",
        question: "every byte of a store changed, zeroed, cut: the right answer or a typed error?",
        in_all: true,
        run: rot::run,
    },
    Layer {
        name: "clock",
        question: "is nothing forgotten early, whatever the clock does?",
        in_all: true,
        run: clock::run,
    },
    Layer {
        name: "kill",
        question: "real SIGKILL at every row of the crash table and at random moments",
        in_all: true,
        run: kill::run,
    },
    Layer {
        name: "block",
        question: "power cuts on real ext4, xfs and btrfs: does every answer hold?",
        in_all: true,
        run: block::run,
    },
    Layer {
        name: "fsyncfail",
        question: "a device refuses writes: is nothing promised, and do restarts agree?",
        in_all: true,
        run: fsyncfail::run,
    },
    Layer {
        name: "peers",
        question: "what do other stores do on the same rigs? a Markdown table",
        in_all: false,
        run: peers::run,
    },
    Layer {
        name: "syscalls",
        question: "the k-th call of the system fails or kills: does a real program lose nothing?",
        in_all: true,
        run: syscalls::run,
    },
    Layer {
        name: "res",
        question: "full disks, small limits, little memory: a typed error and nothing lost?",
        in_all: true,
        run: res::run,
    },
    Layer {
        name: "fuzz",
        question: "do decoders, opens and whole runs survive any bytes?",
        in_all: true,
        run: fuzz::run,
    },
    Layer {
        name: "conc",
        question: "group commit and views under a scheduler that tries interleavings",
        in_all: true,
        run: conc::run,
    },
    Layer {
        name: "mem",
        question: "Miri on bytes, decisions and index; AddressSanitizer on the same and damage",
        in_all: true,
        run: mem::run,
    },
    Layer {
        name: "cover",
        question: "which lines of format, log and recovery do the tests reach?",
        in_all: false,
        run: cover::run,
    },
    Layer {
        name: "instructions",
        question: "does any operation need more instructions than its bound? (valgrind)",
        in_all: true,
        run: instructions::run,
    },
    Layer {
        name: "syncs",
        question: "each call that makes something durable left out in turn: does a test notice?",
        in_all: true,
        run: syncs::run,
    },
    Layer {
        name: "mutants",
        question: "faults put into the source on purpose: does a test notice each?",
        in_all: true,
        run: mutants::run,
    },
];
