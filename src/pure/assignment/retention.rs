//! How long a VM stays with a user who does not use it: the text in a pool's `spec.retention`.

use k8s_openapi::jiff::{SignedDuration, Span, Timestamp, tz::TimeZone};

/// How long an assignment lasts.
#[derive(Clone, Debug)]
pub enum Retention {
    /// For this time after its last use: an ISO 8601 duration, such as `PT1h` or `P1D`. Days, weeks and months are those of UTC.
    For(Span),
    /// Until this point in time, however it is used: `2027-01-31T18:00:00Z`.
    Until(Timestamp),
}

/// A text that is no retention. Nothing is taken away because of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RetentionError {
    /// It begins with `P` and is no duration.
    #[error("spec.retention is {text:?}, which is no ISO 8601 duration such as PT1H or P7D: {why}")]
    Duration {
        /// The text.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// It is a duration below zero.
    #[error("spec.retention is {text:?}, and a duration can't be less than zero")]
    Negative {
        /// The text.
        text: String,
    },
    /// It does not begin with `P` and is no point in time.
    #[error(
        "spec.retention is {text:?}, which is neither an ISO 8601 duration such as PT1H nor a point in time such as 2027-01-31T18:00:00Z: {why}"
    )]
    Time {
        /// The text.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// It is a number, or the like.
    #[error(
        "spec.retention is no text; write a duration such as PT1H, or a point in time such as 2027-01-31T18:00:00Z"
    )]
    NoText,
}

impl Retention {
    /// Reads the text of a pool. One that begins with `P` is a duration, every other one a point in time.
    ///
    /// # Errors
    /// [`RetentionError`].
    pub fn parse(text: &str) -> Result<Self, RetentionError> {
        let owned = || text.to_owned();
        if !text.starts_with('P') {
            let time = text.parse().map(Self::Until);
            return time.map_err(|error: k8s_openapi::jiff::Error| RetentionError::Time {
                text: owned(),
                why: error.to_string(),
            });
        }
        match text.parse::<Span>() {
            Ok(span) if span.is_negative() => Err(RetentionError::Negative { text: owned() }),
            Ok(span) => Ok(Self::For(span)),
            Err(error) => Err(RetentionError::Duration { text: owned(), why: error.to_string() }),
        }
    }

    /// Until when a VM is kept for the user who used it last at that time. `None`: for ever, because the end is later than any time.
    pub fn end(&self, last_use: Timestamp) -> Option<Timestamp> {
        match self {
            Self::Until(end) => Some((*end).max(last_use)),
            Self::For(span) => {
                let end = last_use.to_zoned(TimeZone::UTC).checked_add(*span).ok()?.timestamp();
                Some(end.max(last_use))
            }
        }
    }
}

/// A time that much later; the last one that there is, if it were beyond.
pub fn later(time: Timestamp, by: SignedDuration) -> Timestamp {
    time.checked_add(by).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_begins_with_p_is_a_duration_and_every_other_one_a_point_in_time() {
        let time = |text: &str| text.parse::<Timestamp>().unwrap();
        for (text, end) in [
            ("PT1h", "2027-01-15T13:00:00Z"),
            ("PT90M", "2027-01-15T13:30:00Z"),
            ("P1D", "2027-01-16T12:00:00Z"),
            ("P1DT2H", "2027-01-16T14:00:00Z"),
            ("P2W", "2027-01-29T12:00:00Z"),
            ("P1M", "2027-02-15T12:00:00Z"),
            ("PT0S", "2027-01-15T12:00:00Z"),
            ("PT0.5S", "2027-01-15T12:00:00.5Z"),
            ("2027-02-01T00:00:00Z", "2027-02-01T00:00:00Z"),
            ("2027-02-01T02:00:00+02:00", "2027-02-01T00:00:00Z"),
            // A time that has passed takes nothing away from whoever uses the VM now.
            ("2026-12-24T18:00:00Z", "2027-01-15T12:00:00Z"),
        ] {
            let retention = Retention::parse(text).unwrap();
            assert_eq!(retention.end(time("2027-01-15T12:00:00Z")), Some(time(end)), "{text}");
        }
        assert_eq!(Retention::parse("P19000Y").unwrap().end(time("2027-01-15T12:00:00Z")), None, "it never ends");
    }

    #[test]
    fn another_text_is_an_error_that_says_what_to_write() {
        for (text, words) in [
            ("", "neither an ISO 8601 duration such as PT1H nor a point in time"),
            ("1h", "neither"),
            ("three weeks", "neither"),
            ("2027-13-01T00:00:00Z", "neither"),
            ("P", "no ISO 8601 duration such as PT1H or P7D"),
            ("PT", "no ISO 8601 duration"),
            ("P1H", "no ISO 8601 duration"),
            ("PT-1H", ""),
            ("-PT1H", "neither"),
        ] {
            let error = Retention::parse(text).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains(&format!("{text:?}")), "{text}: {error}");
        }
    }
}
