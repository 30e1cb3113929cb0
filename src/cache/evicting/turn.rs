//! The step a policy is asked about.

/// The step a policy is asked about.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turn {
    /// Tokens of every batch row before the step, and after it.
    pub(crate) before: Vec<usize>,
    pub(crate) after: Vec<usize>,
    /// The length of every batch row's prompt; none while more chunks of it follow.
    pub(crate) prompts: Vec<Option<usize>>,
    /// Whether the prompt of a batch row ends with this step: once, whatever steps pass the row by.
    pub(crate) ends_prompt: Vec<bool>,
}

impl Turn {
    /// Lets go of what is held, by layer and batch row, for prompts that are over.
    pub(crate) fn release<T>(&self, held: &mut [Vec<Vec<T>>]) {
        for layer in held {
            for (held, prompt) in layer.iter_mut().zip(&self.prompts) {
                if prompt.is_some() {
                    *held = Vec::new();
                }
            }
        }
    }

    /// What is known of the prompts once every batch row was taken back to its length in `to`: one that
    /// is taken back in part is over.
    pub(super) fn shorten(&mut self, to: &[usize]) {
        for (prompt, &to) in self.prompts.iter_mut().zip(to) {
            *prompt = prompt.filter(|_| to > 0).map(|prompt| to.min(prompt));
        }
    }

    pub(super) fn select_rows(&mut self, rows: &[usize]) {
        let of = |prompts: &[Option<usize>], row| prompts.get(row).copied().flatten();
        *self = Self {
            prompts: rows.iter().map(|&row| of(&self.prompts, row)).collect(),
            ..Self::default()
        };
    }
}
