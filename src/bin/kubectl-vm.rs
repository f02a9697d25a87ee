//! The kubectl plugin: see `vm_operator::cli`.
fn main() -> std::process::ExitCode {
    vm_operator::cli::main()
}
