//! An API server in memory. It knows what the manager's requests need: [`store`] has the objects and answers requests, [`fields`] has
//! server-side apply, and [`kinds`] has the kinds. What it refuses is in [`schema`], [`quota`] and [`immutable`].

pub mod fields;
mod immutable;
pub mod kinds;
mod quota;
pub mod request;
mod schema;
pub mod store;
