# Short names for commands of Cargo and of the development helper: see `cargo xtask --help`.
XTASK := cargo xtask

.DEFAULT_GOAL := help
.PHONY: help build test bench fuzz lint fmt demo demo-down crds images cluster-up cluster-down clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Builds the helper with Cargo's output, because the first build takes minutes.
xtask:
	@cargo build --features dev --bin xtask

build: ## Build the programs
	cargo build

test: xtask ## Run all tests, also those on a real cluster; the last line shows how many
	@$(XTASK) test

bench: ## Compare the manager with a minimal client that sends the same writes; BENCH holds options
	@$(XTASK) bench $(BENCH)

fuzz: ## Test random templates and VMs for an hour (FUZZ_SECONDS)
	FUZZ_SECONDS=$${FUZZ_SECONDS:-3600} cargo test --release --no-default-features --features schema --test fuzz -- --nocapture

lint: ## Check the format and run Clippy
	cargo fmt --check
	cargo clippy --all-targets --all-features -- -D warnings

fmt: ## Format the source
	cargo fmt

demo: xtask ## Start a guest from nothing, on a new local cluster or on the cluster of KUBECONFIG
	@$(XTASK) demo

demo-down: ## Remove the demo and its cluster
	@$(XTASK) demo-down

crds: ## Generate crds/*.yaml from the types
	@$(XTASK) crds

images: ## Build the container images
	@$(XTASK) images

cluster-up: ## Start a Kubernetes cluster with one node on this computer
	@$(XTASK) cluster up

cluster-down: ## Stop that cluster
	@$(XTASK) cluster down

clean: cluster-down ## Remove everything that was built in this tree
	rm -rf .dev target
