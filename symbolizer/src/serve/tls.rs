//! TLS of a server: its certificate, and those of clients. Read again when the files change.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use sha2::{Digest, Sha256};

use super::changed::{Files, Watched};
use crate::profile::hex;
use crate::receive::peer::CertificateName;

/// Files in PEM.
#[derive(Clone, Debug)]
pub struct Tls {
    /// The server's certificate, with those between it and its CA.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// Who signs certificates of clients; without it, clients need a token.
    pub client_ca: Option<PathBuf>,
    /// Certificates of clients that are revoked.
    pub client_crl: Option<PathBuf>,
    /// Clients may come without a certificate: they have a token.
    pub is_certificate_optional: bool,
}

/// Gives each connection the certificates of the moment.
#[derive(Debug)]
pub(super) struct Certificates {
    tls: Tls,
    config: Mutex<Watched<Arc<ServerConfig>>>,
}

impl Certificates {
    /// Reads them.
    ///
    /// # Errors
    /// Which file cannot be used, and why.
    pub(super) fn new(tls: Tls) -> io::Result<Self> {
        let paths = [&tls.certificate, &tls.key].into_iter();
        let paths = paths.chain(&tls.client_ca).chain(&tls.client_crl).cloned();
        let config = Watched::new(Files::new(paths), |_| read(&tls))?;
        Ok(Self { tls, config: Mutex::new(config) })
    }

    /// For the next connection.
    pub(super) fn now(&self) -> Arc<ServerConfig> {
        let mut config = self.config.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(config.now(|_| read(&self.tls)))
    }
}

fn read(tls: &Tls) -> io::Result<Arc<ServerConfig>> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let builder = match &tls.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| at(path, &error))?;
            }
            let mut clients =
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            if let Some(path) = &tls.client_crl {
                let lists = CertificateRevocationListDer::pem_file_iter(path);
                let lists = lists.map_err(|error| at(path, &error))?;
                let lists: Result<Vec<_>, _> = lists.collect();
                clients = clients
                    .with_crls(lists.map_err(|error| at(path, &error))?)
                    // A CA without a list has revoked nothing.
                    .allow_unknown_revocation_status();
            }
            if tls.is_certificate_optional {
                clients = clients.allow_unauthenticated();
            }
            builder.with_client_cert_verifier(clients.build().map_err(|error| at(path, &error))?)
        }
    };
    let key = PrivateKeyDer::from_pem_file(&tls.key).map_err(|error| at(&tls.key, &error))?;
    let mut config = builder
        .with_single_cert(certificates(&tls.certificate)?, key)
        .map_err(|error| at(&tls.certificate, &error))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> io::Result<Vec<CertificateDer<'static>>> {
    let found = CertificateDer::pem_file_iter(path).map_err(|error| at(path, &error))?;
    let found: Result<Vec<_>, _> = found.collect();
    let found = found.map_err(|error| at(path, &error))?;
    if found.is_empty() {
        return Err(at(path, &"no certificate is in it"));
    }
    Ok(found)
}

fn at(path: &Path, error: &dyn std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display()))
}

/// What a certificate that was verified is called.
pub(super) fn name(certificate: &CertificateDer<'_>) -> Option<CertificateName> {
    let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
    // Nothing else is called as a URI is.
    let uri = certificate.valid_uri_names().find(|uri| uri.contains("://"));
    let named = uri.or_else(|| certificate.valid_dns_names().next()).map(str::to_owned);
    // As `openssl x509 -pubkey | openssl pkey -pubin -outform DER | sha256sum`.
    let key = || format!("sha256:{}", hex(&Sha256::digest(certificate.subject_public_key_info())));
    Some(CertificateName(named.unwrap_or_else(key)))
}
