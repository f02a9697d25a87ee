# Short names for commands of Cargo and of the development helper: see `cargo xtask --help`.
XTASK := cargo xtask
# The helper as the demo and the tests build it: static, from the same crates as the programs in the images.
HELPER := target/static/x86_64-unknown-linux-gnu/debug/xtask

# Where the images are, and the namespace of the manifest.
REGISTRY ?= localhost
NAMESPACE ?= vm-operator
# Where `make install` puts the program.
PREFIX ?= /usr/local
BINDIR ?= $(PREFIX)/bin
DATADIR ?= $(PREFIX)/share

.DEFAULT_GOAL := help
.PHONY: help try build test bench scale soak bench-runner fuzz sim sim-planted e2e-faults lint fmt demo demo-down crds manifests chart-test gitops-test web-test install images push manifest guest-package kubectl-package dist sbom reproducible cluster-up cluster-down clean xtask helper

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Builds the helper with Cargo's output, because the first build takes minutes.
xtask:
	@cargo build --features dev --bin xtask

helper:
	@cargo static --bin xtask

try: ## Run the example's VM on this computer, without a cluster; RUN holds options
	@tests/guest/build.sh .dev/guest/guest.img
	@cargo build --no-default-features --features local --bin vm-runner
	@target/debug/vm-runner run example/quickstart/vm.yaml --image .dev/guest/guest.img $(RUN)

build: ## Build the programs
	cargo build

# The helper and the programs of the images are built with the tests: alone, all crates would be compiled once more for each.
test: ## Run all tests, also those on a real cluster; the last line shows how many
	@cargo static-test --no-run
	@$(HELPER) test

bench: ## Compare the manager with a minimal client that sends the same writes; BENCH holds options
	@$(XTASK) bench $(BENCH)

scale: ## Measure how the manager's work grows with the number of VMs, on pretended nodes; SCALE holds options
	@$(XTASK) scale $(SCALE)

soak: ## Do everything at once on 300 VMs for SOAK_MINUTES (120): does the manager need more and more? SOAK holds options
	@$(XTASK) soak $(SOAK)

bench-runner: ## Measure the runner's memory and the guest's networks, and write them into docs/performance.md
	VM_OPERATOR_TEST_UPDATE=1 cargo test --release --no-default-features --features runner --test guest measures:: -- --ignored --nocapture

fuzz: ## Test random templates and VMs, and what the runner reads, for an hour each (FUZZ_SECONDS)
	FUZZ_SECONDS=$${FUZZ_SECONDS:-3600} cargo test --release --no-default-features --features schema --test fuzz -- --nocapture
	FUZZ_SECONDS=$${FUZZ_SECONDS:-3600} cargo test --release --no-default-features --features runner --test fuzz_runner -- --nocapture

sim: ## Simulate the manager in many random scenarios (SIM_SEEDS, SIM_FIRST), or in one (SEED)
	$(if $(SEED),SIM_SEED=$(SEED)) SIM_STRIDE=1 SIM_SEEDS=$${SIM_SEEDS:-2000} cargo test --profile sim --no-default-features --features manager,vmctl --test sim -- --nocapture $(if $(SEED),random_scenarios)

e2e-faults: ## Kill kubelet, containerd, API server, etcd, manager and node below guests, and take memory away (as root, ten minutes)
	cargo static-test --test node -- --ignored --nocapture --test-threads 1 faults::

sim-planted: ## Plant bugs in a copy of the source, one after the other: the simulation must find each
	tests/sim/planted.sh

lint: ## Check the format and run Clippy
	cargo fmt --check
	cargo clippy --all-targets --all-features -- -D warnings
	cargo check --lib --no-default-features

fmt: ## Format the source
	cargo fmt

demo: ## Start a guest from nothing, on a new local cluster or on the cluster of KUBECONFIG
	@test -e $(HELPER) || cat tests/xtask/first-demo.txt
	@cargo static --bins
	@$(HELPER) demo

demo-down: helper ## Remove the demo and its cluster
	@$(HELPER) demo-down

crds: ## Generate crds/*.yaml, and their copies in the Helm chart, from the types
	@$(XTASK) crds

manifests: xtask ## Write deploy/*.yaml from the Helm chart in deploy/chart, and the table of its values (builds Helm once)
	@$(XTASK) manifests

chart-test: xtask ## Test the Helm chart: renderings, refused values, and an installation on a real API server (builds Helm once)
	@$(XTASK) chart-test

gitops-test: xtask ## Test VMs in Git beside the real controllers of Flux and the real Argo CD (builds them once)
	@$(XTASK) kustomize-controller
	@$(XTASK) helm-controller
	@$(XTASK) helm
	@$(XTASK) argo-cd
	cargo test --features dev --test api_server gitops:: -- --ignored --nocapture --test-threads=1

web-test: ## Test the sign-in with a real provider of OpenID Connect in a browser (needs npm)
	npm ci --no-audit --no-fund --prefix tests/oidc
	cargo test --features dev --test api_server real_provider -- --ignored --nocapture

install: ## Build kubectl-vm and install it with completion and manual pages into PREFIX (/usr/local), below DESTDIR if that is set
	cargo build --release --no-default-features --features cli --bin kubectl-vm
	install -D -m 755 target/release/kubectl-vm $(DESTDIR)$(BINDIR)/kubectl-vm
	ln -sf kubectl-vm $(DESTDIR)$(BINDIR)/kubectl_complete-vm
	mkdir -p $(DESTDIR)$(DATADIR)/bash-completion/completions $(DESTDIR)$(DATADIR)/zsh/site-functions $(DESTDIR)$(DATADIR)/fish/vendor_completions.d
	target/release/kubectl-vm completion bash > $(DESTDIR)$(DATADIR)/bash-completion/completions/kubectl-vm
	target/release/kubectl-vm completion zsh > $(DESTDIR)$(DATADIR)/zsh/site-functions/_kubectl-vm
	target/release/kubectl-vm completion fish > $(DESTDIR)$(DATADIR)/fish/vendor_completions.d/kubectl-vm.fish
	target/release/kubectl-vm man --out $(DESTDIR)$(DATADIR)/man/man1

images: helper ## Build the container images for REGISTRY, as they are published
	@$(HELPER) images --profile release --registry $(REGISTRY)

push: images ## Build the container images and push them to REGISTRY
	@$(HELPER) push --registry $(REGISTRY)

manifest: helper ## Print one manifest that installs the CRDs and the manager, with images of REGISTRY, into NAMESPACE
	@$(HELPER) manifest --registry $(REGISTRY) --namespace $(NAMESPACE)

guest-package: ## Build the package with the login agent for Debian and Ubuntu guests into dist
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1); \
		deploy/guest-package/build.sh "$$version" "dist/vmop-agent_$${version}_all.deb" && ls -l "dist/vmop-agent_$${version}_all.deb"

kubectl-package: ## Build the Debian package of kubectl-vm into dist
	cargo build --release --no-default-features --features cli --bin kubectl-vm
	@version=$$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1); \
		deploy/kubectl-package/build.sh "$$version" target/release/kubectl-vm "dist/kubectl-vm_$${version}_amd64.deb" && ls -l "dist/kubectl-vm_$${version}_amd64.deb"

dist: helper ## Build what a release consists of beside the images, for REGISTRY, into dist; DOWNLOADS is the URL of its files
	@$(HELPER) dist --registry $(REGISTRY) --namespace $(NAMESPACE) $(if $(DOWNLOADS),--downloads $(DOWNLOADS))

sbom: helper ## Write an SBOM (CycloneDX) of each program into dist, with cargo-cyclonedx, which is built once
	@$(HELPER) sbom

reproducible: helper ## Build the programs of a release twice, in different directories, and compare them; PROGRAMS names some
	@$(HELPER) reproducible --registry $(REGISTRY) $(PROGRAMS)

cluster-up: ## Start a Kubernetes cluster with one node on this computer
	@$(XTASK) cluster up

cluster-down: ## Stop that cluster
	@$(XTASK) cluster down

clean: cluster-down ## Remove everything that was built in this tree
	rm -rf .dev target dist
