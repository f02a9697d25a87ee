//! The program vm-runner.
fn main() {}
