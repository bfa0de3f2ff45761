//! The documents of the repository's `docs` folder.

#[doc = include_str!("../docs/guarantees.md")]
pub mod guarantees {}

#[doc = include_str!("../docs/choosing.md")]
pub mod choosing {}

#[doc = include_str!("../docs/defaults.md")]
pub mod defaults {}

#[doc = include_str!("../docs/design.md")]
pub mod design {}

#[doc = include_str!("../docs/protocol.md")]
pub mod protocol {}

#[doc = include_str!("../docs/compatibility.md")]
pub mod compatibility {}

#[doc = include_str!("../docs/acl.md")]
pub mod acl {}

#[doc = include_str!("../docs/failure-modes.md")]
pub mod failure_modes {}

#[doc = include_str!("../docs/testing.md")]
pub mod testing {}
