//! Whose a process is, by what it said of itself: labels such as `service_name`. Pure.
//!
//! Parses the OpenTelemetry process context (`ProcessContext` of opentelemetry-proto 1.11) and the
//! two variables of the environment that name a service: "General SDK configuration" of the
//! OpenTelemetry specification. A process says what it likes: of all attributes those are taken
//! that have a label here, and what does not parse is as if it had not been said.

use prost::Message;
use stackwire_proto::v1;

/// Labels there are, each with the attribute it is.
const LABELS: [(&str, &[&str]); 5] = [
    ("service_name", &["service.name"]),
    ("service_namespace", &["service.namespace"]),
    ("service_version", &["service.version"]),
    ("service_instance_id", &["service.instance.id"]),
    // The second until version 1.27 of the semantic conventions.
    ("deployment_environment_name", &["deployment.environment.name", "deployment.environment"]),
];
/// Longest value: the conventions have no limit, SDKs cut at 255.
const MAX_VALUE: usize = 255;

#[derive(Clone, PartialEq, Message)]
struct ProcessContext {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyValue {
    /// Other kinds of values are stepped over.
    #[prost(string, optional, tag = "1")]
    string: Option<String>,
}

/// Labels of a process. The context comes before `OTEL_SERVICE_NAME`, and that before
/// `OTEL_RESOURCE_ATTRIBUTES`.
pub(super) fn labels(process: &v1::Process) -> Vec<(&'static str, String)> {
    let v1::Process { process_context, otel_service_name, otel_resource_attributes, .. } = process;
    let mut attributes = of_context(process_context);
    let text = |bytes: &[u8]| std::str::from_utf8(bytes).unwrap_or_default().to_owned();
    attributes.push(("service.name".to_owned(), text(otel_service_name)));
    attributes.extend(of_environment(&text(otel_resource_attributes)));
    let value_of = |name: &&str| {
        let fits = |(key, value): &&(String, String)| key == name && is_value(value);
        attributes.iter().find(fits).map(|(_, value)| value.clone())
    };
    let label = |(label, names): (&'static str, &[&str])| {
        names.iter().find_map(value_of).map(|value| (label, value))
    };
    LABELS.into_iter().filter_map(label).collect()
}

fn is_value(value: &str) -> bool {
    (1..=MAX_VALUE).contains(&value.len()) && !value.contains(char::is_control)
}

fn of_context(bytes: &[u8]) -> Vec<(String, String)> {
    let resource = ProcessContext::decode(bytes).ok().and_then(|context| context.resource);
    let attributes = resource.unwrap_or_default().attributes.into_iter();
    attributes.filter_map(|it| Some((it.key, it.value?.string?))).collect()
}

/// `key1=value1,key2=value2`, percent-encoded where a character would be one of these.
fn of_environment(text: &str) -> Vec<(String, String)> {
    let pair = |pair: &str| {
        let (key, value) = pair.split_once('=')?;
        Some((unescaped(key.trim())?, unescaped(value.trim())?))
    };
    // All of it is discarded where a part is malformed: "the entire environment variable value
    // SHOULD be discarded".
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty()).map(pair);
    pairs.collect::<Option<_>>().unwrap_or_default()
}

fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        let digits = std::str::from_utf8(digits).ok()?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn context(attributes: &[(&str, &str)]) -> Vec<u8> {
        let attributes = attributes.iter().map(|(key, value)| KeyValue {
            key: (*key).to_owned(),
            value: Some(AnyValue { string: Some((*value).to_owned()) }),
        });
        let resource = Some(Resource { attributes: attributes.collect() });
        ProcessContext { resource }.encode_to_vec()
    }

    fn said(context: Vec<u8>, name: &str, attributes: &str) -> Vec<(&'static str, String)> {
        labels(&v1::Process {
            process_context: context,
            otel_service_name: name.into(),
            otel_resource_attributes: attributes.into(),
            ..v1::Process::default()
        })
    }

    #[test]
    fn what_says_more_exactly_comes_first() {
        let attributes = "service.name=c,service.version=1%2C2 , deployment.environment=test";
        let of_all = [
            ("service_version", "1,2".to_owned()),
            ("deployment_environment_name", "test".to_owned()),
        ];
        let with = |name: &str| [&[("service_name", name.to_owned())], &of_all[..]].concat();
        assert_eq!(said(Vec::new(), "", attributes), with("c"));
        assert_eq!(said(Vec::new(), "b", attributes), with("b"));
        let context = context(&[("service.name", "a"), ("host.name", "x")]);
        assert_eq!(said(context, "b", attributes), with("a"));
    }

    #[test]
    fn what_does_not_parse_was_not_said() {
        assert_eq!(said(b"\xff\xff".to_vec(), "", "service.name"), []);
        assert_eq!(said(Vec::new(), "", "service.name=%4"), []);
        assert_eq!(said(Vec::new(), "a\nb", "service.name=%00"), []);
        assert_eq!(said(Vec::new(), &"x".repeat(256), ""), []);
        assert_eq!(said(context(&[("service.name", "")]), "b", ""), [("service_name", "b".into())]);
    }

    proptest! {
        #[test]
        fn never_panics(context: Vec<u8>, name: Vec<u8>, attributes: Vec<u8>) {
            let process = v1::Process {
                process_context: context,
                otel_service_name: name,
                otel_resource_attributes: attributes,
                ..v1::Process::default()
            };
            prop_assert!(labels(&process).len() <= LABELS.len());
        }
    }
}
