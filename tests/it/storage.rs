//! Where entries are stored.

mod sliding;
