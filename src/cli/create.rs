//! `kubectl vm create`: makes VMs, or their manifests for Git. What is in a manifest is [`actions::create`](crate::actions::create).
//!
//! ```text
//!  options, keys ─▶ manifest ─▶ checked as the API server does it ─▶ printed (--dry-run=client)
//!                                                                 └▶ created ─▶ runs ─▶ its agent answers, or its console asks for a login
//! ```

mod clone;
mod login;

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use clap::Args;
use futures::future::join_all;
use kube::{
    Client, ResourceExt,
    api::{DynamicObject, PostParams},
};
use serde_json::Value;
use tokio::{io::AsyncReadExt, time::Instant};

use self::login::{data_text, keys_in, own_keys, user_data};
use super::{
    cluster::ClusterOptions,
    expose,
    format::{DataFormat, ObjectFormat, print_objects},
    in_pod::InPod,
    manifest::{self, Violation},
    output::{Exit, Failure, Output, note, yaml},
    upload,
    vms::{api, exit, failure, refused, title},
    wait::{self, Goal, seconds, time},
    write::DryRun,
};
use crate::{
    actions::{
        VmHandle,
        create::{
            DISK_SIZE, DiskImage, IMPORT_SET, ImageName, LEAST_DISK, NewVm, WantedNetwork, WantedUser,
            login::{is_key, is_user_name},
            manifest as manifest_of, plain_size,
        },
    },
    api::{
        Quantity,
        conditions::{self, TEMPLATES_VALID},
    },
    ownership::COMMAND_MANAGER,
    process::ErrorChain,
};

#[derive(Args)]
pub(super) struct Options {
    /// The names of the new VMs. They are alike.
    #[arg(value_name = "NAME", required = true)]
    names: Vec<String>,
    /// What fills the disk: debian:12, debian:13, ubuntu:22.04 or ubuntu:24.04; https://... or http://..., which the VM's Pod downloads (qcow2
    /// or raw); oci:IMAGE, a container image with a disk in /disk; claim:NAME, a claim that the storage clones; ./FILE, which is uploaded.
    /// Default: the disk is empty.
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// The image of a URL has the format raw. Default: qcow2, unless its name ends with .raw.
    #[arg(long, requires = "image")]
    raw: bool,
    /// The checksum that the image of a URL must have: SHA-256 or SHA-512, in hexadecimal digits. The short names have those of their
    /// distributions.
    #[arg(long, alias = "sha512", value_name = "SUM", requires = "image")]
    sha256: Option<String>,
    /// Also create a Service, as `expose --port PORT --target-port TARGET` does. Can be given several times.
    #[arg(long, value_name = "PORT[:TARGET]", value_parser = port, conflicts_with = "dry_run")]
    port: Vec<(u16, u16)>,
    /// A CD in a drive, for an installation: https://..., or the name of a file in the claim vmop-image-repository.
    #[arg(long, value_name = "CD")]
    cd: Option<String>,
    /// CPUs.
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u32).range(1..=1024))]
    cpus: u32,
    /// Memory.
    #[arg(long, value_name = "SIZE", default_value = "2Gi", value_parser = quantity)]
    ram: Quantity,
    /// The size of the disk. Default: that of the claim that is cloned, or else 10Gi, or more if the disk in a file is larger.
    #[arg(long, value_name = "SIZE", value_parser = quantity)]
    disk: Option<Quantity>,
    /// The storage class of the disk. Default: the manager's, or the cluster's.
    #[arg(long, value_name = "NAME")]
    storage_class: Option<String>,
    /// The network: pod (the guest has the Pod's address), user (nothing reaches the guest), bridge=NAME (a bridge of the node), or none.
    #[arg(long, value_name = "NETWORK", default_value = "pod", value_parser = network)]
    network: WantedNetwork,
    /// The user who can log in, and become root. Default with --image: $USER.
    #[arg(long, value_name = "NAME", conflicts_with = "cloud_init")]
    user: Option<String>,
    /// A public key of that user, or a file with some. Can be given several times. Default: ~/.ssh/*.pub, or what ssh-add -L prints.
    #[arg(long, value_name = "KEY|FILE", conflicts_with = "cloud_init")]
    ssh_key: Vec<String>,
    /// The user-data for cloud-init, instead of a user with keys; - is standard input.
    #[arg(long, value_name = "FILE")]
    cloud_init: Option<PathBuf>,
    /// A pool to which the VM belongs. Can be given several times.
    #[arg(long, value_name = "POOL")]
    pool: Vec<String>,
    /// The template set that fills the disk.
    #[arg(long, value_name = "NAME", default_value = IMPORT_SET)]
    set: String,
    /// Do not start it, and leave spec.vm.state out, so that people start and stop it, also if the manifest is in Git.
    #[arg(long)]
    stopped: bool,
    /// Do not wait for the guest.
    #[arg(long)]
    no_wait: bool,
    /// How long to wait for the guest, such as 90s or 1h.
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = time)]
    timeout: Duration,
    /// Create nothing: client asks no cluster, server asks it whether it would accept the VM.
    #[arg(long, value_name = "HOW")]
    dry_run: Option<DryRun>,
    /// Print the VM: with --dry-run=client -o yaml a file for Git.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<ObjectFormat>,
    /// The name under which the API server notes who created it.
    #[arg(long, value_name = "NAME", default_value = COMMAND_MANAGER)]
    field_manager: String,
    #[command(flatten)]
    cluster: ClusterOptions,
}

pub(super) fn quantity(text: &str) -> Result<Quantity, String> {
    Quantity::parse(text).map_err(|error| error.to_string())
}

fn port(text: &str) -> Result<(u16, u16), String> {
    let (port, target) = text.split_once(':').unwrap_or((text, text));
    let number = |text: &str| text.parse().ok().filter(|port| *port > 0);
    number(port).zip(number(target)).ok_or_else(|| "write a port from 1 to 65535, or PORT:TARGET".to_owned())
}

fn network(text: &str) -> Result<WantedNetwork, String> {
    Ok(match (text, text.strip_prefix("bridge=")) {
        ("pod", _) => WantedNetwork::Pod,
        ("user", _) => WantedNetwork::User,
        ("none", _) => WantedNetwork::Nothing,
        (_, Some(bridge)) if !bridge.is_empty() => WantedNetwork::Bridge(bridge.to_owned()),
        _ => return Err("write pod, user, bridge=NAME or none".into()),
    })
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    if let Some(name) = twice(&options.names) {
        return Err(Failure::usage(format!("{} is there twice", title(name))));
    }
    let mut wanted = options.wanted()?;
    if let Some(DiskImage::Claim { name, mode }) = &mut wanted.image
        && options.dry_run != Some(DryRun::Client)
    {
        *mode = options.clone_of(name, &mut wanted.disk, &mut wanted.class).await?;
    }
    let mut manifests = Vec::new();
    for name in &options.names {
        let vm = manifest_of(&NewVm { name: name.clone(), ..wanted.clone() });
        check(name, &vm)?;
        manifests.push(vm);
    }
    if options.dry_run == Some(DryRun::Client) {
        let documents = ObjectFormat::Data(DataFormat::Yaml);
        for (name, vm) in options.names.iter().zip(&manifests) {
            match &options.output {
                Some(format) if *format == documents && manifests.len() > 1 => {
                    write!(output, "---\n{}", yaml(vm)?)?;
                }
                Some(format) if *format == documents => write!(output, "{}", yaml(vm)?)?,
                Some(_) => {}
                None => writeln!(output, "{} created{}", title(name), DryRun::mark(options.dry_run))?,
            }
        }
        return match options.output.as_ref().filter(|format| **format != documents) {
            Some(format) => print_objects(&manifests, manifests.len() == 1, format, output).map(|()| Exit::Success),
            None => Ok(Exit::Success),
        };
    }
    options.create(manifests, output).await
}

/// A name that is in a list twice.
fn twice(names: &[String]) -> Option<&String> {
    names.iter().enumerate().find(|(at, name)| names.iter().take(*at).any(|other| other == *name)).map(|(_, name)| name)
}

impl Options {
    /// What the options say, with what they leave out. The name is that of the first VM.
    fn wanted(&self) -> Result<NewVm, Failure> {
        if self.image.is_none() && self.cd.is_none() {
            return Err(Failure::usage(
                "say what the VM boots: --image debian:13, --image https://... (qcow2 or raw), or --cd for an installation",
            ));
        }
        let (image, least) = self.image()?.map_or((None, 0), |(image, least)| (Some(image), least));
        if !self.port.is_empty() && self.network != WantedNetwork::Pod {
            return Err(Failure::usage(
                "--port needs --network pod: nothing in the cluster reaches a guest on another network",
            ));
        }
        Ok(NewVm {
            name: self.names.first().cloned().unwrap_or_default(),
            namespace: self.cluster.namespace.clone(),
            image,
            cd: self.cd.clone(),
            cpus: self.cpus,
            ram: self.ram.clone(),
            disk: plain_size(&self.size(least)?),
            class: self.storage_class.clone(),
            network: self.network.clone(),
            user: self.login()?,
            pools: self.pool.clone(),
            set: self.set.clone(),
            start: !self.stopped,
        })
    }

    /// The size of the disk, on which this many bytes must have room.
    fn size(&self, least: u64) -> Result<Quantity, Failure> {
        let Some(size) = &self.disk else {
            let rounded = least.checked_next_multiple_of(1 << 30).unwrap_or(least);
            return Ok(Quantity::with_unit(rounded.max(DISK_SIZE)));
        };
        if size.bytes() < LEAST_DISK {
            return Err(Failure::usage(format!(
                "--disk {size} is too little: a number without a unit is in bytes; write for example 20Gi"
            )));
        }
        if size.bytes() < least {
            let least = Quantity::with_unit(least.checked_next_multiple_of(1 << 20).unwrap_or(least));
            return Err(Failure::usage(format!("--disk {size} is too small: the disk in the image has {least}")));
        }
        Ok(size.clone())
    }

    /// What fills the disk, and how much room that needs, as far as it is known. A file is read, for its size and checksum.
    fn image(&self) -> Result<Option<(DiskImage, u64)>, Failure> {
        let Some(text) = &self.image else { return Ok(None) };
        let name = ImageName::parse(text, self.raw, self.sha256.as_deref());
        Ok(Some(match name.map_err(|error| Failure::usage(error.to_string()))? {
            ImageName::Known(image) => (image, 0),
            ImageName::File(file) => upload::described(Path::new(&file))?,
        }))
    }

    /// The file that is uploaded.
    fn file(&self) -> Option<&Path> {
        let name = ImageName::parse(self.image.as_deref()?, self.raw, None);
        if let Ok(ImageName::File(_)) = name { self.image.as_deref().map(Path::new) } else { None }
    }

    /// Who can log in.
    fn login(&self) -> Result<WantedUser, Failure> {
        if let Some(file) = &self.cloud_init {
            return Ok(WantedUser::Data(user_data(&data_text(file)?, file)?));
        }
        // An installer asks whom to make.
        if self.image.is_none() && self.user.is_none() && self.ssh_key.is_empty() {
            return Ok(WantedUser::Nobody);
        }
        let user = self.user.clone().or_else(|| std::env::var("USER").ok()).filter(|user| !user.is_empty());
        let user = user.ok_or_else(|| Failure::usage("say who can log in: --user, because $USER is not set"))?;
        if !is_user_name(&user) {
            return Err(Failure::usage(format!(
                "{user:?} is no name of a user in a guest: give another one by --user"
            )));
        }
        let mut keys = Vec::new();
        for key in &self.ssh_key {
            keys.extend(if is_key(key) { vec![key.clone()] } else { keys_in(Path::new(key))? });
        }
        if self.ssh_key.is_empty() {
            keys = own_keys();
        }
        if keys.is_empty() {
            return Err(Failure::usage(
                "nobody could log in: there is no key in ~/.ssh/*.pub or in ssh-agent; give one by --ssh-key, or --cloud-init",
            ));
        }
        Ok(WantedUser::Keys { user, keys })
    }

    async fn create(&self, manifests: Vec<Value>, output: &mut Output<'_>) -> Result<Exit, Failure> {
        let begin = Instant::now();
        let cluster = self.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
        let (client, namespace) = (&cluster.client, cluster.namespace.as_str());
        let parameters = PostParams {
            dry_run: self.dry_run == Some(DryRun::Server),
            field_manager: Some(self.field_manager.clone()),
        };
        let (mut created, mut failed) = (Vec::new(), 0);
        for manifest in manifests {
            let object: DynamicObject =
                serde_json::from_value(manifest).map_err(|error| Failure::new(error.to_string()))?;
            let name = object.name_any();
            match api(client, namespace).create(&parameters, &object).await {
                Ok(object) => created.push(object),
                Err(error) => {
                    let line = refused(client, &title(&name), &["create"], Some(namespace), &error).await;
                    if created.is_empty() && !matches!(error, kube::Error::Api(_)) {
                        return Err(failure(line, &error));
                    }
                    note(&line);
                    failed += 1;
                }
            }
        }
        let waits = self.dry_run.is_none() && !self.stopped && !self.no_wait;
        let dry = DryRun::mark(self.dry_run);
        if self.output.is_none() {
            for vm in &created {
                writeln!(output, "{} created{dry}", title(&vm.name_any()))?;
            }
        } else if let Some(format) = &self.output {
            let objects: Vec<Value> = created.iter().map(|vm| serde_json::json!(vm)).collect();
            print_objects(&objects, self.names.len() == 1, format, output)?;
        }
        output.flush()?;
        for vm in created.iter().map(ResourceExt::name_any).filter(|_| self.dry_run.is_none()) {
            for (port, target) in &self.port {
                let wanted = expose::Options::of_port(&vm, *port, *target, &self.field_manager, &self.cluster);
                // Behind data these lines are talk.
                let exposed = match self.output {
                    Some(_) => expose::run(&wanted, &mut Output::new(&mut anstream::stderr())).await,
                    None => expose::run(&wanted, output).await,
                };
                if let Err(failure) = exposed {
                    failure.report();
                    failed += 1;
                }
            }
        }
        let (mut up, mut timed_out) = (0, false);
        if waits {
            let each = created.iter().map(ResourceExt::name_any).map(|name| async move {
                let end = self.follow(client, namespace, &name, begin).await;
                (name, end)
            });
            for (name, end) in join_all(each).await {
                match end {
                    Ok(what) => {
                        up += 1;
                        let what = format!("{}: {what} ({})", title(&name), seconds(begin.elapsed()));
                        if self.output.is_none() { writeln!(output, "{what}")? } else { note(&what) }
                    }
                    Err(Exit::TimeOut) => timed_out = true,
                    Err(_) => failed += 1,
                }
            }
            output.flush()?;
        } else {
            up = created.len();
        }
        if let Some(file) = self.file().filter(|_| !waits && self.dry_run.is_none()) {
            for vm in created.iter().map(ResourceExt::name_any) {
                let command = upload::command(&vm, namespace, file);
                note(&format!("{}: its disk waits for the file: {command}", title(&vm)));
            }
        }
        if let Some(vm) = created.first().filter(|_| up > 0 && self.dry_run.is_none()) {
            note(&self.next(&vm.name_any()));
        }
        Ok(if timed_out { Exit::TimeOut } else { exit(up, failed) })
    }

    /// Waits for the guest of a new VM, and says how far it came.
    async fn follow(
        &self,
        client: &Client,
        namespace: &str,
        name: &str,
        mut begin: Instant,
    ) -> Result<&'static str, Exit> {
        let vm = VmHandle::new(client.clone(), namespace, name);
        if let Some(file) = self.file() {
            // Its checksum was computed for the manifest, and is compared in the Pod.
            if let Err(failure) = upload::send(&vm, file, None, Some(self.timeout), &self.cluster).await {
                let exit = failure.report();
                self.help(&vm).await;
                return Err(exit);
            }
            // The time of the upload is not that of the start.
            begin = Instant::now();
        }
        let started = wait::wait(client, namespace, name, &Goal::FirstStart, begin, self.timeout).await;
        if let Err(exit) = started.reached() {
            self.help(&vm).await;
            return Err(exit);
        }
        if self.image.is_none() {
            return Ok("runs; its installer is on the display and perhaps on the console");
        }
        tokio::select! {
            booted = wait::wait(client, namespace, name, &Goal::Booted, begin, self.timeout) => {
                booted.reached().map(|()| "is up: its agent answers")
            }
            () = login_prompt(&vm, &self.cluster) => Ok("is up: its console asks for a login"),
        }
    }

    /// Says what helps a VM that does not start.
    async fn help(&self, vm: &VmHandle) {
        let status = vm.get().await.ok().and_then(|vm| vm.status).unwrap_or_default();
        let of_templates = conditions::find(&status.conditions, TEMPLATES_VALID).filter(|it| it.status == "False");
        if let Some(wrong) = of_templates {
            note(&format!("{}: {}", title(vm.name()), wrong.message));
        }
        if of_templates.is_some() && self.image.is_some() {
            note(&format!(
                "the template set {} fills disks; to install it, with the manager's namespace: kubectl vm templates pack import-disk --set {} \
                 | kubectl -n NAMESPACE apply --server-side -f -; then the VM starts by itself",
                self.set, self.set
            ));
        } else {
            note(&format!("kubectl vm explain {} -n {} says why", vm.name(), vm.namespace()));
        }
    }

    /// The three commands that a person is likely to need next.
    fn next(&self, name: &str) -> String {
        let place = self.cluster.for_shell();
        if self.stopped {
            return format!(
                "next:\n  kubectl vm start {name}{place}\n  kubectl vm console {name}{place}\n  kubectl vm status {name}{place}"
            );
        }
        let second = if self.network == WantedNetwork::Pod && self.image.is_some() {
            format!("kubectl vm ssh {name}{place}")
        } else {
            format!("kubectl vm view {name}{place}")
        };
        format!("next:\n  kubectl vm console {name}{place}\n  {second}\n  kubectl vm stop {name}{place}")
    }
}

/// Checks a manifest as the API server checks it, before anything is created.
pub(super) fn check(name: &str, vm: &Value) -> Result<(), Failure> {
    let wrong = |message: String| format!("{}: {message}", title(name));
    let parsed = serde_yaml::to_value(vm).map_err(|error| Failure::new(wrong(error.to_string())))?;
    match manifest::read(&yaml(vm)?, &parsed) {
        Ok(_) => Ok(()),
        Err(violations) => Err(Failure::Command {
            lines: violations.into_iter().map(|Violation { message, .. }| wrong(message)).collect(),
            exit: Exit::Usage,
        }),
    }
}

/// How much of the console is looked at.
const PROMPT: usize = 4096;

/// Returns when the guest's serial console asks for a login. Never, if it can't be looked at.
async fn login_prompt(vm: &VmHandle, cluster: &ClusterOptions) {
    let console = async {
        let pod = InPod::of(vm, &vm.get().await.ok()?, cluster).await.ok()?;
        let mut command = tokio::process::Command::from(pod.runner(&["--stdin", "--quiet"], &["console"]));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
        let mut console = command.spawn().ok()?;
        let (mut stdout, mut seen) = (console.stdout.take()?, Vec::new());
        while stdout.read_buf(&mut seen).await.ok()? > 0 {
            if asks_for_login(&seen) {
                return Some(());
            }
            seen.drain(..seen.len().saturating_sub(PROMPT));
        }
        None
    };
    if console.await.is_none() {
        std::future::pending::<()>().await;
    }
}

/// Whether the last thing on a console is getty's question (agetty(8)).
fn asks_for_login(console: &[u8]) -> bool {
    String::from_utf8_lossy(console).trim_end().ends_with(" login:")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn options(line: &str) -> Result<Options, String> {
        crate::cli::parsed(line).map_err(|error| error.to_string())
    }

    fn wanted(line: &str) -> Result<NewVm, String> {
        options(line)?.wanted().map_err(|failure| failure.words())
    }

    const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc ann@desk";

    #[test]
    fn a_command_line_becomes_a_vm() {
        let keys = tempfile::NamedTempFile::new().unwrap();
        fs::write(keys.path(), format!("# mine\n{KEY}\n\n{KEY}\n")).unwrap();
        let line = format!(
            "web -n vms --image debian:12 --user ann --ssh-key {} --ram 4GiB --disk 20GiB --cpus 1",
            keys.path().display()
        );
        let wanted = wanted(&line).unwrap();
        assert_eq!((wanted.name.as_str(), wanted.namespace.as_deref()), ("web", Some("vms")));
        assert_eq!((wanted.disk.as_str(), wanted.ram.to_string().as_str(), wanted.start), ("20Gi", "4GiB", true));
        assert_eq!(wanted.user, WantedUser::Keys { user: "ann".into(), keys: vec![KEY.into(), KEY.into()] });
        check("web", &manifest_of(&wanted)).unwrap();
        assert!(yaml(&manifest_of(&wanted)).unwrap().contains(&format!("- {KEY}\n")), "not folded");
    }

    #[test]
    fn an_installation_needs_no_user() {
        let wanted = wanted("web --cd debian.iso --network bridge=br1 --stopped --pool desks --pool spare").unwrap();
        assert_eq!(wanted.pools, ["desks", "spare"]);
        assert_eq!(
            (wanted.user, wanted.network, wanted.start),
            (WantedUser::Nobody, WantedNetwork::Bridge("br1".into()), false)
        );
    }

    #[test]
    fn what_is_wrong_is_said_before_anything_is_created() {
        let private = tempfile::NamedTempFile::new().unwrap();
        fs::write(private.path(), "-----BEGIN OPENSSH PRIVATE KEY-----\n").unwrap();
        let private = format!("web --image debian:12 --user ann --ssh-key {}", private.path().display());
        for (line, complaint) in [
            ("", "required"),
            ("web", "say what the VM boots"),
            ("web --image fedora:1 --user ann", "is no image that can fill a disk"),
            ("web --image https://a/b.iso", "give it by --cd"),
            ("web --cd a.iso --network tap", "write pod, user, bridge=NAME or none"),
            ("web --cd a.iso --cpus 0", "0 is not in"),
            ("web --cd a.iso --disk much", "is not a size"),
            ("web --cd a.iso --disk 20", "--disk 20 is too little: a number without a unit is in bytes"),
            ("web --image ./a.vmdk --user ann", "has another format than qcow2 and raw"),
            ("web --image ./none.img --user ann", "./none.img:1:1: No such file"),
            ("web --image oci:a/b --sha256 ab --user ann", "a checksum is for https://"),
            ("web --cd a.iso --network user --port 22", "--port needs --network pod"),
            ("web --cd a.iso --port 0", "write a port from 1 to 65535"),
            ("web --image debian:12 --user Ann", "is no name of a user"),
            ("web --image debian:12 --user ann --ssh-key /nowhere.pub", "/nowhere.pub"),
            ("web --image debian:12 --user ann --cloud-init x", "cannot be used with"),
            (private.as_str(), "this is a private key"),
        ] {
            let error = wanted(line).unwrap_err();
            assert!(error.contains(complaint), "{line}: {error}");
        }
        let named =
            |name: &str| check(name, &manifest_of(&NewVm { name: name.into(), ..wanted("x --cd a.iso").unwrap() }));
        assert!(named("web").is_ok());
        for name in ["Web", "a_b", &"x".repeat(64)] {
            let failure = named(name).unwrap_err();
            assert!(failure.words().starts_with(&format!("vm/{name}: ")), "{}", failure.words());
            assert_eq!(failure.report(), Exit::Usage);
        }
    }

    #[test]
    fn a_disk_has_room_for_what_is_in_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut head = vec![0_u8; 104];
        head[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        head[24..32].copy_from_slice(&((12_u64 << 30) + 1).to_be_bytes());
        fs::write(file.path(), &head).unwrap();
        let disk = |more: &str| {
            let line = format!("web --image {} {more}", file.path().display());
            let options = options(&line).unwrap();
            let (_, least) = options.image().unwrap().unwrap();
            options.size(least).map(|size| plain_size(&size)).map_err(|failure| failure.words())
        };
        assert_eq!(disk(""), Ok("13Gi".into()));
        assert_eq!(disk("--disk 40Gi"), Ok("40Gi".into()));
        assert!(disk("--disk 12Gi").unwrap_err().starts_with("--disk 12Gi is too small: the disk in the image has "));
        assert_eq!(options("web --cd a.iso").unwrap().size(0).unwrap().to_string(), "10Gi");
    }

    #[test]
    fn a_name_is_there_once() {
        let names = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(twice(&names("a b c")), None);
        assert_eq!(twice(&names("a b a b")).map(String::as_str), Some("a"));
    }

    #[test]
    fn a_console_that_asks_for_a_login_is_recognized() {
        for (console, asks) in [
            ("\r\nDebian GNU/Linux 12 web ttyS0\r\n\r\nweb login: ", true),
            ("web login:", true),
            ("last login: yesterday\r\n$ ", false),
            ("", false),
        ] {
            assert_eq!(asks_for_login(console.as_bytes()), asks, "{console}");
        }
    }

    #[test]
    fn the_next_commands_are_for_this_vm() {
        let next = |line: &str| options(line).unwrap().next("web");
        insta::assert_snapshot!(next("web -n vms --image debian:12 --user ann"), @r"
        next:
          kubectl vm console web -n vms
          kubectl vm ssh web -n vms
          kubectl vm stop web -n vms
        ");
        assert!(next("web --cd a.iso").contains("kubectl vm view web"));
        assert!(next("web --cd a.iso --stopped").contains("kubectl vm start web\n"));
        let elsewhere = next("web -n vms --context it's --kubeconfig /a --cd a.iso");
        assert!(elsewhere.contains("kubectl vm view web -n vms --context 'it'\\''s' --kubeconfig /a\n"), "{elsewhere}");
    }
}
