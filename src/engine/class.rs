//! The four effect classes, as types: what a class does not allow does not compile.

use std::fmt;

use crate::key::NamespaceKind;

/// An effect class: one of [`Repeatable`], [`Probeable`], [`NonRepeatable`], [`Internal`].
pub trait EffectClass: sealed::Sealed + fmt::Debug + Send + Sync + 'static {
    /// The kind of namespace that holds claims of this class.
    const KIND: NamespaceKind;
}

/// A class whose claims may be committed without a durable start.
pub trait DirectCommit: EffectClass {}

mod sealed {
    /// Keeps the classes to the four that the format knows.
    pub trait Sealed {}
}

macro_rules! class {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        pub enum $name {}
        impl sealed::Sealed for $name {}
        impl EffectClass for $name {
            const KIND: NamespaceKind = NamespaceKind::$name;
        }
    };
}

class! {
    /// Running the effect twice is harmless, or its target honours the derived key.
    Repeatable
}
class! {
    /// The target can be asked whether the effect happened: see [`crate::Namespace::with_probe`].
    Probeable
}
class! {
    /// Neither: an effect that may have begun is in doubt until somebody resolves it.
    NonRepeatable
}
class! {
    /// All effects are writes into this store.
    Internal
}

impl DirectCommit for Repeatable {}
impl DirectCommit for Internal {}
