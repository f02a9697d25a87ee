//! The kubectl plugin.
fn main() -> std::process::ExitCode {
    vm_operator::cli::main()
}
