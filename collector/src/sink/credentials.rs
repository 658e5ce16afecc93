//! What a collector shows to a symbolizer, and how it knows one. Files are read for each
//! connection: certificates and tokens are renewed while a collector runs.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// Files, in PEM but for the token.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    /// CA of symbolizers; without it, those that the system trusts.
    pub ca: Option<PathBuf>,
    /// The collector's certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The collector's token.
    pub token: Option<PathBuf>,
}

impl Credentials {
    /// TLS to a host of this name.
    pub(super) fn tls(&self, host: &str) -> io::Result<ClientTlsConfig> {
        let config = ClientTlsConfig::new().domain_name(host);
        let config = match &self.ca {
            Some(ca) => config.ca_certificate(Certificate::from_pem(read(ca)?)),
            None => config.with_native_roots(),
        };
        Ok(match &self.identity {
            Some((certificate, key)) => {
                config.identity(Identity::from_pem(read(certificate)?, read(key)?))
            }
            None => config,
        })
    }

    /// What a request says of who sends it.
    pub(super) fn authorization(&self) -> io::Result<Option<MetadataValue<Ascii>>> {
        let Some(path) = &self.token else { return Ok(None) };
        let token = read(path)?;
        let token = String::from_utf8_lossy(&token);
        let value = format!("Bearer {}", token.trim()).parse();
        // The reason would show a part of the token.
        value.map(Some).map_err(|_invalid| {
            let wrong = format!("{}: it is not a token of one line", path.display());
            io::Error::new(io::ErrorKind::InvalidData, wrong)
        })
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    fs::read(path)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}
