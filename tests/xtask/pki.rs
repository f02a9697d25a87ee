//! Keys, certificates, tokens and kubeconfigs of a cluster.

use std::net::IpAddr;
use std::path::Path;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};
use serde_json::json;

use crate::tools::{make_dir, random_hex, write};

/// The first address of the Service range: what `kubernetes.default` is for Pods.
pub const SERVICE_ADDRESS: &str = "10.96.0.1";
/// The range of the addresses of Services.
pub const SERVICE_RANGE: &str = "10.96.0.0/16";
/// The name of the only node.
pub const NODE: &str = "node";

/// Writes all that the components need to trust each other below `dir`, and `kubeconfig` beside it.
///
/// The serving certificate holds the address of the `kubernetes` Service: clients in Pods verify that one.
pub fn create(dir: &Path, server: &str, address: IpAddr) -> Result<()> {
    let pki = dir.join("pki");
    make_dir(&pki)?;
    let authority_key = KeyPair::generate().context("generating a key")?;
    let mut authority = CertificateParams::new(Vec::<String>::new())?;
    authority.distinguished_name.push(DnType::CommonName, "vm-operator test cluster");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let authority_pem = authority.self_signed(&authority_key)?.pem();
    write(&pki.join("ca.crt"), &authority_pem)?;
    let issuer = Issuer::new(authority, authority_key);
    create_for_etcd(&pki)?;

    let issue = |file: &str, name: &str, organization: Option<&str>, usage, addresses: &[IpAddr]| -> Result<()> {
        let key = KeyPair::generate().context("generating a key")?;
        let names = if addresses.is_empty() {
            vec![]
        } else {
            ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"].map(str::to_owned).to_vec()
        };
        let mut params = CertificateParams::new(names)?;
        params.subject_alt_names.extend(addresses.iter().map(|address| SanType::IpAddress(*address)));
        params.distinguished_name.push(DnType::CommonName, name);
        if let Some(organization) = organization {
            params.distinguished_name.push(DnType::OrganizationName, organization);
        }
        params.extended_key_usages = vec![usage];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        write(&pki.join(format!("{file}.crt")), params.signed_by(&key, &issuer)?.pem())?;
        write(&pki.join(format!("{file}.key")), key.serialize_pem())
    };
    let addresses = [IpAddr::from([127, 0, 0, 1]), SERVICE_ADDRESS.parse()?, address];
    issue("apiserver", "kube-apiserver", None, ExtendedKeyUsagePurpose::ServerAuth, &addresses)?;
    issue("kubelet", NODE, None, ExtendedKeyUsagePurpose::ServerAuth, &addresses)?;
    // What the API server shows to the kubelet, for logs and exec.
    issue("kubelet-client", "kube-apiserver", Some("system:masters"), ExtendedKeyUsagePurpose::ClientAuth, &[])?;

    let accounts = KeyPair::generate().context("generating a key")?;
    write(&pki.join("service-accounts.key"), accounts.serialize_pem())?;
    write(&pki.join("service-accounts.pub"), accounts.public_key_pem())?;

    // The groups are the ones that Kubernetes' own roles are bound to.
    let mut tokens = String::new();
    for (file, user, groups) in [
        ("kubeconfig", "admin", "system:masters"),
        ("pki/controller-manager.kubeconfig", "system:kube-controller-manager", ""),
        ("pki/scheduler.kubeconfig", "system:kube-scheduler", ""),
        ("pki/kubelet.kubeconfig", "system:node:node", "system:nodes"),
        ("pki/proxy.kubeconfig", "system:kube-proxy", ""),
        ("pki/provisioner.kubeconfig", "local-provisioner", "system:masters"),
    ] {
        let token = random_hex(16)?;
        tokens.push_str(&format!("{token},{user},{user},\"{groups}\"\n"));
        write(&dir.join(file), kubeconfig(server, &authority_pem, user, &token)?)?;
    }
    write(&pki.join("tokens.csv"), tokens)
}

/// etcd has an authority of its own: who has a certificate of it reads and writes everything, so only etcd and the API server have one.
fn create_for_etcd(pki: &Path) -> Result<()> {
    let authority_key = KeyPair::generate().context("generating a key")?;
    let mut authority = CertificateParams::new(Vec::<String>::new())?;
    authority.distinguished_name.push(DnType::CommonName, "vm-operator test cluster's etcd");
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    write(&pki.join("etcd-ca.crt"), authority.self_signed(&authority_key)?.pem())?;
    let issuer = Issuer::new(authority, authority_key);
    // One certificate for all ends: etcd is a client of itself, and of its peers.
    for name in ["etcd", "etcd-client"] {
        let key = KeyPair::generate().context("generating a key")?;
        let mut params = CertificateParams::new(vec!["localhost".to_owned()])?;
        params.subject_alt_names.push(SanType::IpAddress(IpAddr::from([127, 0, 0, 1])));
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        write(&pki.join(format!("{name}.crt")), params.signed_by(&key, &issuer)?.pem())?;
        write(&pki.join(format!("{name}.key")), key.serialize_pem())?;
    }
    Ok(())
}

fn kubeconfig(server: &str, authority: &str, user: &str, token: &str) -> Result<String> {
    let authority = ByteString(authority.as_bytes().to_vec());
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "vm-operator", "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": "vm-operator", "context": {"cluster": "vm-operator", "user": user}}],
        "current-context": "vm-operator",
    });
    Ok(serde_yaml::to_string(&config)?)
}
