//! The store on a Redis or Valkey server.

pub(crate) mod script;
