//! Asking a server over HTTP, for `ps` and `fetch`: where it is, how it knows us, what it answers.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow};
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use reqwest::{Certificate, Client, Identity, Response, Url};
use serde::Deserialize;

use super::Failure;
use crate::cli::ask::FromOptions;

/// A server that can be asked.
pub struct Server {
    client: Client,
    base: Url,
    address: String,
}

/// How long a connection may take. An answer takes as long as the server needs to make it.
const CONNECT: Duration = Duration::from_secs(5);

/// What a server says where it has no answer.
#[derive(Deserialize)]
struct Refusal {
    error: String,
}

impl Server {
    /// One that is where the options say.
    pub fn of(options: &FromOptions) -> Result<Self, Failure> {
        let address = options.from.clone();
        let wrong = |why: &str| Failure::Usage(format!("--from {address}: {why}"));
        // Whoever was first has installed the same.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut client = Client::builder().connect_timeout(CONNECT).use_rustls_tls().no_proxy();
        let base = match address.strip_prefix("unix:") {
            Some(path) => {
                let path = path.strip_prefix("//").unwrap_or(path);
                client = client.unix_socket(Path::new(path));
                Url::parse("http://localhost")
            }
            None => Url::parse(&address),
        };
        let base = base
            .map_err(|_not_one| wrong("write unix:/path, https://host:port or http://host:port"))?;
        let is_clear = base.scheme() == "http" && !address.starts_with("unix:");
        if !matches!(base.scheme(), "http" | "https") {
            return Err(wrong("write unix:/path, https://host:port or http://host:port"));
        }
        if is_clear && options.token_file.is_some() && !is_here(&base) && !options.insecure {
            return Err(wrong(
                "a token would go there in clear text; write https://, or add --insecure",
            ));
        }
        let read = |path: &Path| {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
        };
        if base.scheme() != "https" {
            // A host without any certificates of authorities needs none then.
            client = client.tls_certs_only([]);
        }
        if let Some(path) = &options.tls_ca {
            let found = Certificate::from_pem_bundle(&read(path)?);
            let found = found.with_context(|| format!("no certificates in {}", path.display()))?;
            client = client.tls_certs_only(found);
        }
        if let Some((certificate, key)) = options.tls_cert.as_ref().zip(options.tls_key.as_ref()) {
            let both = [read(key)?, read(certificate)?].concat();
            let identity = Identity::from_pem(&both);
            let identity = identity.with_context(|| {
                format!("cannot use {} with {}", certificate.display(), key.display())
            })?;
            client = client.identity(identity);
        }
        if let Some(path) = &options.token_file {
            let token = String::from_utf8(read(path)?)
                .map_err(|_bytes| anyhow!("{} is no text", path.display()))?;
            let mut value = HeaderValue::try_from(format!("Bearer {}", token.trim()))
                .map_err(|_bad| anyhow!("{} has more than a token in it", path.display()))?;
            value.set_sensitive(true);
            client = client.default_headers(HeaderMap::from_iter([(AUTHORIZATION, value)]));
        }
        let client = client.build().context("cannot use TLS")?;
        Ok(Self { client, base, address })
    }

    /// Asks for a path.
    pub async fn get(&self, path: &str, query: &[(&str, String)]) -> anyhow::Result<Response> {
        let mut url = self.base.join(path)?;
        if !query.is_empty() {
            url.query_pairs_mut().extend_pairs(query);
        }
        let answer = self.client.get(url).send().await;
        let answer = answer.with_context(|| format!("cannot ask {}", self.address))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(answer);
        }
        let said = answer.bytes().await.unwrap_or_default();
        let why = match serde_json::from_slice::<Refusal>(&said) {
            Ok(Refusal { error }) => error,
            Err(_other) => format!("it answers {status}; is it a stackwire serve?"),
        };
        Err(anyhow!("{}: {why}", self.address))
    }
}

/// Whether a URL is of this host.
pub fn is_here(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default().trim_matches(['[', ']']);
    let ip = host.parse::<std::net::IpAddr>();
    host == "localhost" || ip.is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Runs what waits for a server.
pub fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    Ok(runtime.context("cannot start the runtime")?.block_on(work)?)
}
