//! A certificate authority: certificates good and bad, in files.

use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber, date_time_ymd,
};

/// One with a directory of its own.
pub(crate) struct Authority {
    directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new(directory: &Path) -> Self {
        std::fs::create_dir_all(directory).unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        // Of its own: a certificate with the name of its issuer passes for self-signed.
        params.distinguished_name.push(DnType::CommonName, "authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(directory.join("ca.pem"), certificate.pem()).unwrap();
        Self { directory: directory.to_owned(), issuer: Issuer::new(params, key) }
    }

    pub(crate) fn file(&self, name: &str) -> String {
        self.directory.join(name).to_str().unwrap().to_owned()
    }

    /// Certificate and key of a server on this host: `NAME.pem` and `NAME.key`.
    pub(crate) fn server(&self, name: &str) {
        let mut params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        params.subject_alt_names.push(SanType::IpAddress("127.0.0.1".parse().unwrap()));
        self.sign(name, params);
    }

    /// The same of a client: named by a URI, and good until that year.
    pub(crate) fn client(&self, name: &str, until: i32) {
        let mut params = CertificateParams::default();
        let uri = format!("spiffe://test/{name}").try_into().unwrap();
        params.subject_alt_names.push(SanType::URI(uri));
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(until, 1, 1);
        params.serial_number = Some(serial(name));
        self.sign(name, params);
    }

    /// Says that clients are revoked, in `crl.pem`.
    pub(crate) fn revoke(&self, names: &[&str]) {
        let revoked = names.iter().map(|name| RevokedCertParams {
            serial_number: serial(name),
            revocation_time: date_time_ymd(2021, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2021, 1, 1),
            next_update: date_time_ymd(2100, 1, 1),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).unwrap().pem().unwrap();
        std::fs::write(self.file("crl.pem"), list).unwrap();
    }

    fn sign(&self, name: &str, params: CertificateParams) {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        std::fs::write(self.file(&format!("{name}.pem")), certificate.pem()).unwrap();
        std::fs::write(self.file(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

fn serial(name: &str) -> SerialNumber {
    SerialNumber::from_slice(name.as_bytes())
}
