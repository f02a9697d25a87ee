//! The program vm-operator.
fn main() {}
