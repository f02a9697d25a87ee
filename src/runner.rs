//! The program inside each Pod: drives QEMU and reports the guest's state.
