//! An API server in memory. It knows what the manager's requests need: [`store`] has the objects and answers requests, [`fields`] has
//! server-side apply, and [`kinds`] has the schemas.

pub mod fields;
pub mod kinds;
pub mod request;
pub mod store;
