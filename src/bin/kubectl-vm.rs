//! The program kubectl-vm.
fn main() {}
