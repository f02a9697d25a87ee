//! Which entry of a list that people edit is which recorded one.
//!
//! An entry without a name is known by its parameters and its neighbours. So the VM's status has the entry of each device as it was last, and an
//! entry that is still there keeps what belongs to it, whatever happened around it: a disk its claim, a network its addresses. [`numbers`] is that
//! comparison:
//!
//! | an entry | gets the number of |
//! |---|---|
//! | with the parameters of a recorded entry, in the same order | that entry |
//! | with the parameters of a recorded entry that is left, in another order: the list was sorted | that entry |
//! | with other parameters, between the same neighbours, or at the same position: it was edited | the recorded entry that is left there |
//! | with the parameters of an entry that was taken out | that entry: it comes back |
//! | any other | nobody: it has a new number |

use std::collections::BTreeSet;

use crate::api::status::ListEntry;

/// A recorded entry, and its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The number: of the disk's claim, or of the network's slot.
    pub number: u32,
    /// The entry as it was.
    pub entry: ListEntry,
    /// It was taken out.
    pub unused: bool,
}

/// More comparisons than this are not made: no VM has so many disks.
const MOST: usize = 10_000;

/// The numbers of the entries, in their order, by the table at the head of this module. `taken` are numbers that no new entry may have.
pub fn numbers(recorded: &[Recorded], entries: &[ListEntry], taken: &[u32]) -> Vec<u32> {
    if recorded.is_empty() {
        return entries.iter().map(|entry| entry.position).collect();
    }
    let mut numbers = matched(recorded, entries);
    let mut back: Vec<&Recorded> = recorded.iter().filter(|recorded| recorded.unused).collect();
    let mut known: Vec<u32> = recorded.iter().map(|recorded| recorded.number).chain(taken.iter().copied()).collect();
    for (entry, number) in entries.iter().zip(&mut numbers).filter(|(_, number)| number.is_none()) {
        let same = back.iter().position(|recorded| recorded.entry.parameters == entry.parameters);
        *number = same.map(|at| back.remove(at).number).or_else(|| {
            let new = std::iter::once(entry.position).chain(0..).find(|number| !known.contains(number));
            known.extend(new);
            new
        });
    }
    numbers.into_iter().flatten().collect()
}

/// The numbers of the entries that are recorded ones which were not taken out: the first three lines of the table.
pub fn matched(recorded: &[Recorded], entries: &[ListEntry]) -> Vec<Option<u32>> {
    let mut used: Vec<&Recorded> = recorded.iter().filter(|recorded| !recorded.unused).collect();
    used.sort_by_key(|recorded| (recorded.entry.position, recorded.number));
    let mut matching = Matching { found: vec![None; entries.len()], is_free: vec![true; used.len()] };
    let is_same = |at: usize, of: usize| entries[at].parameters == used[of].entry.parameters;

    let aligned = aligned(entries, &used);
    aligned.iter().filter(|(at, of)| is_same(*at, *of)).for_each(|pair| matching.take(*pair));
    matching.take_all(&is_same);
    aligned.iter().for_each(|pair| matching.take(*pair));
    matching.take_all(&|at, of| entries[at].position == used[of].entry.position);

    let number = |of: Option<usize>| of.and_then(|of| used.get(of)).map(|recorded| recorded.number);
    matching.found.iter().map(|of| number(*of)).collect()
}

/// The slots of all entries: those that were found, and for each other one the slot of its position, or the first that is free. Slots of `former` entries
/// are taken only if there are no others below `most`. No slot is given twice: of more than `most` entries some have a slot that no machine has.
pub fn fill(found: Vec<Option<u32>>, former: &BTreeSet<u32>, most: u32) -> Vec<u32> {
    let mut used: BTreeSet<u32> = found.iter().flatten().copied().collect();
    let mut free = |position: u32| {
        let slots = || std::iter::once(position).chain(0..most);
        let unused = slots().find(|slot| !used.contains(slot) && !former.contains(slot));
        let slot = unused.or_else(|| slots().chain(most..).find(|slot| !used.contains(slot))).unwrap_or(u32::MAX);
        used.insert(slot);
        slot
    };
    (0..).zip(found).map(|(position, slot)| slot.unwrap_or_else(|| free(position))).collect()
}

/// Which entry has which recorded one.
struct Matching {
    found: Vec<Option<usize>>,
    is_free: Vec<bool>,
}

impl Matching {
    fn take(&mut self, (at, of): (usize, usize)) {
        if self.found[at].is_none() && self.is_free[of] {
            (self.found[at], self.is_free[of]) = (Some(of), false);
        }
    }

    fn take_all(&mut self, fits: &impl Fn(usize, usize) -> bool) {
        for at in 0..self.found.len() {
            if let Some(of) = (0..self.is_free.len()).find(|of| self.is_free[*of] && fits(at, *of)) {
                self.take((at, of));
            }
        }
    }
}

/// The pairs of an alignment of both lists in their order, in which as many as possible are the same, and then as many as possible were edited in
/// their place. Of several such, the one with the pairs nearest to the begin.
fn aligned(entries: &[ListEntry], used: &[&Recorded]) -> Vec<(usize, usize)> {
    const SAME: usize = 3;
    let (rows, columns) = (entries.len(), used.len());
    if rows * columns > MOST {
        return Vec::new();
    }
    let worth = |at: usize, of: usize| if entries[at].parameters == used[of].entry.parameters { SAME } else { 1 };
    // The best of what begins at each pair.
    let mut best = vec![vec![0; columns + 1]; rows + 1];
    for at in (0..rows).rev() {
        for of in (0..columns).rev() {
            best[at][of] = (best[at + 1][of + 1] + worth(at, of)).max(best[at + 1][of]).max(best[at][of + 1]);
        }
    }
    let (mut at, mut of, mut pairs) = (0, 0, Vec::new());
    while at < rows && of < columns {
        if best[at][of] == best[at + 1][of + 1] + worth(at, of) {
            pairs.push((at, of));
            (at, of) = (at + 1, of + 1);
        } else if best[at][of] == best[at + 1][of] {
            at += 1;
        } else {
            of += 1;
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entries(parameters: &str) -> Vec<ListEntry> {
        let entry = |(at, letter): (usize, char)| ListEntry { position: at as u32, parameters: letter.to_string() };
        parameters.chars().enumerate().map(entry).collect()
    }

    /// `a0 b1 -c2`: an entry with the parameters `a` has the claim 0; that of `c` was taken out.
    fn records(text: &str) -> Vec<Recorded> {
        let record = |(at, word): (usize, &str)| {
            let (unused, word) = word.strip_prefix('-').map_or((false, word), |word| (true, word));
            let (parameters, number) = word.split_at(1);
            let entry = ListEntry { position: at as u32, parameters: parameters.into() };
            Recorded { number: number.parse().unwrap(), entry, unused }
        };
        text.split_whitespace().enumerate().map(record).collect()
    }

    #[test]
    fn the_table() {
        for (recorded, now, expected, what) in [
            ("", "aab", "0 1 2", "without a record they are counted"),
            ("a0 b1", "b", "1", "the first is taken out"),
            ("a0 b1", "a", "0", "the last is taken out"),
            ("a0 b1 c2 d3", "bd", "1 3", "two are taken out at once"),
            ("a0 b1 a2", "ba", "1 2", "the first of two that look the same"),
            ("a0 b1 c2", "cab", "2 0 1", "sorted"),
            ("a0 b1", "ba", "1 0", "exchanged"),
            ("a0 b1", "bb", "0 1", "the first grows to the size of the second"),
            ("a0 b1", "aa", "0 1", "the second becomes as the first"),
            ("a0 b1", "ac", "0 1", "the second grows"),
            ("a0 b1 c2", "ax", "0 1", "one is edited, and another taken out"),
            ("a0 b1 c2", "xc", "0 2", "the same at the begin"),
            ("a0 b1", "xab", "2 0 1", "a new one comes first"),
            ("a0 b1", "abx", "0 1 2", "a new one comes last"),
            ("a0 a1", "a", "0", "which of two that look the same is gone nobody knows"),
            ("b1 -a0", "b", "1", "what was taken out stays out"),
            ("b1 -a0", "ab", "0 1", "it comes back"),
            ("b1 -a0", "bx", "1 2", "a new one never gets the data of one that was taken out"),
            ("b5", "bx", "5 1", "a number that nobody has"),
            ("-a0", "x", "1", "all were taken out"),
        ] {
            let numbers = numbers(&records(recorded), &entries(now), &[]);
            let numbers: Vec<_> = numbers.iter().map(u32::to_string).collect();
            assert_eq!(numbers.join(" "), expected, "{what}: {recorded} -> {now}");
        }
        assert_eq!(numbers(&records("a0"), &entries("ax"), &[1]), [0, 2], "a number that another claim of the VM has");
    }

    #[derive(Clone, Debug)]
    enum Edit {
        TakeOut(usize),
        Insert(usize),
        Grow(usize),
        Swap(usize, usize),
    }

    fn edits() -> impl Strategy<Value = Vec<Edit>> {
        let at = || 0..6_usize;
        let edit = prop_oneof![
            at().prop_map(Edit::TakeOut),
            at().prop_map(Edit::Insert),
            at().prop_map(Edit::Grow),
            (at(), at()).prop_map(|(one, other)| Edit::Swap(one, other)),
        ];
        prop::collection::vec(edit, 0..20)
    }

    proptest! {
        /// Each disk has other parameters, so that it is known which one an entry is. One edit is seen at a time.
        #[test]
        fn an_entry_that_is_still_there_has_its_claim(edits in edits()) {
            // Disks by what they are, each with its present parameters.
            let mut list: Vec<(usize, usize)> = vec![(0, 0), (1, 1), (2, 2)];
            let mut next = 3;
            let mut recorded: Vec<Recorded> = Vec::new();
            let mut claims: std::collections::BTreeMap<usize, u32> = Default::default();
            for edit in std::iter::once(None).chain(edits.into_iter().map(Some)) {
                let length = list.len();
                match edit {
                    Some(Edit::TakeOut(at)) if at < length => drop(list.remove(at)),
                    Some(Edit::Insert(at)) => { list.insert(at.min(length), (next, next)); next += 1; }
                    Some(Edit::Grow(at)) if at < length => { list[at].1 = next; next += 1; }
                    Some(Edit::Swap(one, other)) if one < length && other < length => list.swap(one, other),
                    _ => {}
                }
                let now: Vec<_> = list.iter().enumerate().map(|(at, (_, parameters))| ListEntry { position: at as u32, parameters: parameters.to_string() }).collect();
                let numbers = numbers(&recorded, &now, &[]);
                prop_assert_eq!(numbers.len(), list.len());
                let distinct: std::collections::BTreeSet<_> = numbers.iter().collect();
                prop_assert_eq!(distinct.len(), numbers.len(), "two entries have one claim");
                for ((disk, _), number) in list.iter().zip(&numbers) {
                    let before = claims.entry(*disk).or_insert(*number);
                    prop_assert_eq!(*before, *number, "disk {}", disk);
                }
                for record in &mut recorded { record.unused |= !numbers.contains(&record.number); }
                for (number, entry) in numbers.iter().zip(now) {
                    recorded.retain(|record| record.number != *number);
                    recorded.push(Recorded { number: *number, entry, unused: false });
                }
            }
            let numbers: std::collections::BTreeSet<_> = claims.values().collect();
            prop_assert_eq!(numbers.len(), claims.len(), "two disks had one claim");
        }
    }
}
