//! Session files taken apart and put together.

use std::collections::BTreeMap;

use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use xxhash_rust::xxh3::xxh3_64;

/// A session file taken apart: its facts, and its tensors by name.
#[derive(Clone)]
pub struct Parts {
    pub facts: BTreeMap<String, String>,
    pub tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Parts {
    pub fn read(file: &[u8]) -> Self {
        let (_, header) = SafeTensors::read_metadata(file).expect("a good file");
        let tensors = SafeTensors::deserialize(file).expect("a good file");
        let tensors = tensors.tensors().into_iter();
        Self {
            facts: header
                .metadata()
                .clone()
                .unwrap_or_default()
                .into_iter()
                .collect(),
            tensors: tensors
                .map(|(name, view)| {
                    (
                        name,
                        (view.dtype(), view.shape().to_vec(), view.data().to_vec()),
                    )
                })
                .collect(),
        }
    }

    /// The file with valid checksums; `None` where the tensors fit no file.
    pub fn sealed(mut self) -> Option<Vec<u8>> {
        self.facts.retain(|key, _| !key.starts_with("checksum"));
        for (name, (dtype, shape, data)) in &self.tensors {
            let numbers: Vec<String> = shape.iter().map(usize::to_string).collect();
            let line = format!("{name} {dtype:?} {}\n", numbers.join(",")).into_bytes();
            let sum = format!("{:016x}", xxh3_64(&[line, data.clone()].concat()));
            self.facts.insert(format!("checksum.{name}"), sum);
        }
        let line = |(key, value): (&String, &String)| {
            format!("{} {key} {} {value}\n", key.len(), value.len())
        };
        let lines: String = self.facts.iter().map(line).collect();
        let sum = format!("{:016x}", xxh3_64(lines.as_bytes()));
        self.facts.insert("checksum".into(), sum);
        let views = self.tensors.iter().map(|(name, (dtype, shape, data))| {
            Ok((name, TensorView::new(*dtype, shape.clone(), data)?))
        });
        let views: Result<Vec<_>, safetensors::SafeTensorError> = views.collect();
        serialize(views.ok()?, Some(self.facts.into_iter().collect())).ok()
    }
}
