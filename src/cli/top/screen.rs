//! What `kubectl vm top` knows and shows: samples and keys in, lines out. Pure.

use std::collections::BTreeMap;

use ratatui::{
    Frame,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
    layout::{Constraint, Layout},
    style::{Modifier, Style},
    text::Line,
    widgets::{Cell, Row, Table, TableState},
};
use serde::Serialize;

use crate::{
    api::stats::{GuestStats, Rates},
    cli::output::plain,
};

/// Namespace and name of a VM.
pub(super) type Key = (String, String);

/// What is known of a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Seen {
    /// Running, Stopped, ...
    pub phase: String,
    /// Its Pod has the node's network, so nobody knows what of the traffic is the guest's.
    #[serde(skip)]
    pub has_nodes_network: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample: Option<GuestStats>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// Why there are no figures.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

impl Seen {
    /// Takes the next sample, or why there is none.
    pub fn take(&mut self, sample: Result<GuestStats, String>) {
        match sample {
            Ok(sample) => {
                self.rates = self.sample.as_ref().and_then(|before| sample.since(before));
                (self.sample, self.trouble) = (Some(sample), None);
            }
            Err(trouble) => *self = Self { trouble: Some(trouble), sample: None, rates: None, ..std::mem::take(self) },
        }
    }
}

/// By what the VMs are sorted: the largest first, names in their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Sort {
    #[default]
    Cpu,
    Memory,
    Disk,
    Network,
    Name,
}

/// What a key asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Start(Key),
    Stop(Key),
    Console(Key),
    Quit,
}

/// The whole state of the program.
#[derive(Clone, Debug, Default)]
pub(super) struct Screen {
    pub vms: BTreeMap<Key, Seen>,
    pub sort: Sort,
    pub has_namespaces: bool,
    /// The VM on which keys work. It is followed when the order changes.
    selected: Option<Key>,
    /// A stop that is to be confirmed.
    stopping: Option<Key>,
    /// What the last command has said.
    pub message: String,
}

const KEYS: &str = "up/down  s: start  x: stop  c: console  C M D N A: sort by CPU memory disk network name  q: quit";

impl Screen {
    pub fn new(sort: Sort, has_namespaces: bool) -> Self {
        Self { sort, has_namespaces, ..Self::default() }
    }

    /// The VMs in the order in which they are shown.
    pub fn order(&self) -> Vec<&Key> {
        let mut keys: Vec<&Key> = self.vms.keys().collect();
        let rate = |key: &Key, of: fn(&Rates) -> f64| self.vms[key].rates.as_ref().map_or(-1.0, of);
        let memory = |key: &Key| self.vms[key].sample.as_ref().and_then(|it| it.ram_used.or(it.resident));
        let largest_first = |one: f64, other: f64| other.total_cmp(&one);
        match self.sort {
            Sort::Name => {}
            Sort::Memory => keys.sort_by_key(|key| std::cmp::Reverse(memory(key))),
            Sort::Cpu => keys.sort_by(|one, other| largest_first(rate(one, |it| it.cpus), rate(other, |it| it.cpus))),
            Sort::Disk => keys.sort_by(|one, other| {
                let disk: fn(&Rates) -> f64 = |it| it.disk_read + it.disk_written;
                largest_first(rate(one, disk), rate(other, disk))
            }),
            Sort::Network => keys.sort_by(|one, other| {
                let network: fn(&Rates) -> f64 = |it| it.network_received + it.network_sent;
                largest_first(rate(one, network), rate(other, network))
            }),
        }
        keys
    }

    /// The VM on which keys work: the first, as long as none is selected.
    fn selected(&self) -> Option<Key> {
        let is_there = |key: &&Key| self.vms.contains_key(key);
        self.selected.as_ref().filter(is_there).or_else(|| self.order().first().copied()).cloned()
    }

    /// What a key does.
    pub fn key(&mut self, key: KeyEvent) -> Option<Act> {
        if let Some(stopping) = self.stopping.take() {
            self.message.clear();
            return (key.code == KeyCode::Char('y')).then_some(Act::Stop(stopping));
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return (key.code == KeyCode::Char('c')).then_some(Act::Quit);
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return Some(Act::Quit),
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::Char('C') => self.sort = Sort::Cpu,
            KeyCode::Char('M') => self.sort = Sort::Memory,
            KeyCode::Char('D') => self.sort = Sort::Disk,
            KeyCode::Char('N') => self.sort = Sort::Network,
            KeyCode::Char('A') => self.sort = Sort::Name,
            KeyCode::Char('s') => return self.selected().map(Act::Start),
            KeyCode::Char('c') | KeyCode::Enter => return self.selected().map(Act::Console),
            KeyCode::Char('x') => {
                if let Some(key) = self.selected() {
                    self.message = format!("stop vm/{}? y: yes, any other key: no", key.1);
                    self.stopping = Some(key);
                }
            }
            _ => {}
        }
        None
    }

    fn select(&mut self, by: isize) {
        let order = self.order();
        let at = self.selected().and_then(|key| order.iter().position(|other| **other == key));
        let last = order.len().saturating_sub(1);
        let next = at.map_or(0, |at| at.saturating_add_signed(by).min(last));
        self.selected = order.get(next).map(|key| (*key).clone());
    }

    fn head(&self) -> Vec<&'static str> {
        let namespace = self.has_namespaces.then_some("NAMESPACE");
        let rest = ["NAME", "PHASE", "CPU", "CPUS", "USED", "RAM", "READ/s", "WRITTEN/s", "IN/s", "OUT/s"];
        namespace.into_iter().chain(rest).collect()
    }

    /// The cells of a VM.
    fn cells(&self, key: &Key) -> Vec<String> {
        let seen = &self.vms[key];
        let sample = seen.sample.as_ref();
        let rate = |of: fn(&Rates) -> f64| seen.rates.as_ref().map(|rates| short(of(rates))).unwrap_or_default();
        let network = |of: fn(&Rates) -> f64| if seen.has_nodes_network { "-".to_owned() } else { rate(of) };
        #[allow(clippy::cast_precision_loss, reason = "for people")]
        let bytes = |count: u64| short(count as f64);
        // What QEMU has on the node is more than what the guest uses: marked.
        let used =
            sample.and_then(|it| it.ram_used.map(bytes).or_else(|| it.resident.map(|it| format!("~{}", bytes(it)))));
        let cpu = seen.rates.as_ref().map(|rates| format!("{:.0}%", rates.cpus * 100.0));
        let namespace = self.has_namespaces.then(|| key.0.clone());
        let rest = [
            key.1.clone(),
            plain(&seen.phase),
            cpu.unwrap_or_default(),
            sample.map(|it| it.cpus.to_string()).unwrap_or_default(),
            used.unwrap_or_default(),
            sample.and_then(|it| it.ram).map(bytes).unwrap_or_default(),
            rate(|it| it.disk_read),
            rate(|it| it.disk_written),
            network(|it| it.network_received),
            network(|it| it.network_sent),
        ];
        namespace.into_iter().chain(rest).collect()
    }

    /// The table for who has no terminal, with the reasons why figures are missing.
    pub fn page(&self) -> String {
        let order = self.order();
        let head = self.head().into_iter().map(str::to_owned).collect::<Vec<_>>();
        let lines: Vec<Vec<String>> = [head].into_iter().chain(order.iter().map(|key| self.cells(key))).collect();
        let widths = self.widths();
        let table = lines.iter().map(|cells| {
            let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<0$}", width + 3));
            format!("{}\n", padded.collect::<String>().trim_end())
        });
        table.collect()
    }

    /// Why figures are missing, a line each.
    pub fn troubles(&self) -> Vec<String> {
        let trouble = |key: &Key| Some(format!("vm/{}: {}", key.1, plain(self.vms[key].trouble.as_ref()?)));
        self.order().into_iter().filter_map(trouble).collect()
    }

    fn widths(&self) -> Vec<usize> {
        let rows: Vec<Vec<String>> = self.order().into_iter().map(|key| self.cells(key)).collect();
        let widest = |(column, title): (usize, &&str)| {
            let cells = rows.iter().map(|cells| cells[column].chars().count());
            cells.chain([title.chars().count()]).max().unwrap_or_default()
        };
        self.head().iter().enumerate().map(widest).collect()
    }

    /// Draws the screen.
    pub fn draw(&self, frame: &mut Frame<'_>) {
        let [title, table, message, keys] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1), Constraint::Length(1)])
                .areas(frame.area());
        let running = self.vms.values().filter(|seen| seen.phase == "Running").count();
        let by = format!("{:?}", self.sort).to_lowercase();
        frame.render_widget(Line::from(format!("{} VMs, {running} running, by {by}", self.vms.len())), title);
        let order = self.order();
        let rows = order.iter().map(|key| Row::new(self.cells(key).into_iter().map(Cell::from)));
        let head = Row::new(self.head()).style(Style::new().add_modifier(Modifier::BOLD));
        let widths = self.widths().into_iter().map(|width| Constraint::Length(width.try_into().unwrap_or(u16::MAX)));
        let selected = self.selected();
        let mut state = TableState::default();
        state.select(selected.as_ref().and_then(|key| order.iter().position(|other| *other == key)));
        let highlight = Style::new().add_modifier(Modifier::REVERSED);
        let widget = Table::new(rows, widths).header(head).column_spacing(2).row_highlight_style(highlight);
        frame.render_stateful_widget(widget, table, &mut state);
        let trouble = selected.and_then(|key| self.vms[&key].trouble.clone());
        let text = Some(&self.message).filter(|text| !text.is_empty()).or(trouble.as_ref());
        frame.render_widget(Line::from(text.map(|text| plain(text).replace('\n', " ")).unwrap_or_default()), message);
        frame.render_widget(Line::from(KEYS), keys);
    }
}

/// An amount in three digits or so: `0`, `512`, `1.5Ki`, `20Mi`.
fn short(amount: f64) -> String {
    let units = ["", "Ki", "Mi", "Gi", "Ti"];
    let (mut amount, mut unit) = (amount, 0);
    while amount >= 1000.0 && unit + 1 < units.len() {
        (amount, unit) = (amount / 1024.0, unit + 1);
    }
    let digits = usize::from(unit > 0 && amount < 10.0 && (amount * 10.0).round() % 10.0 != 0.0);
    format!("{amount:.digits$}{}", units[unit])
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;

    fn key(name: &str) -> Key {
        ("vms".into(), name.into())
    }

    fn sample(at: u64, cpu_time: u64, ram_used: Option<u64>) -> GuestStats {
        GuestStats {
            at,
            cpus: 2,
            cpu_time,
            ram: Some(2 << 30),
            ram_used,
            resident: Some(700 << 20),
            disk_read: at * 3,
            disk_written: 0,
            network_received: at * 2048,
            network_sent: at,
        }
    }

    /// apple is busy, pear has a guest that says nothing of its memory, plum is stopped, fig has a trouble.
    fn screen() -> Screen {
        let mut screen = Screen::default();
        let mut seen = |name: &str, phase: &str, samples: Vec<Result<GuestStats, String>>| {
            let mut seen = Seen { phase: phase.into(), ..Seen::default() };
            samples.into_iter().for_each(|sample| seen.take(sample));
            screen.vms.insert(key(name), seen);
        };
        seen("apple", "Running", vec![Ok(sample(1000, 100, Some(300 << 20))), Ok(sample(3000, 3100, Some(412 << 20)))]);
        seen("pear", "Running", vec![Ok(sample(1000, 100, None)), Ok(sample(3000, 140, None))]);
        seen("plum", "Stopped", vec![]);
        seen("fig", "Running", vec![Ok(sample(1000, 100, None)), Err("pods \"fig\" is forbidden\u{1b}[2J".into())]);
        screen.vms.get_mut(&key("pear")).unwrap().has_nodes_network = true;
        screen
    }

    fn drawn(screen: &Screen) -> String {
        let mut terminal = Terminal::new(TestBackend::new(100, 9)).unwrap();
        terminal.draw(|frame| screen.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y: u16| (0..100).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        let is_reversed = |y: u16| buffer[(0, y)].modifier.contains(Modifier::REVERSED);
        let marked =
            |y: u16| format!("{}{}\n", if is_reversed(y) { "> " } else { "  " }, line(y)).trim_end().to_owned();
        (0..9).map(marked).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_screen_shows_the_busiest_first() {
        let expected = [
            "  4 VMs, 3 running, by cpu",
            "  NAME   PHASE    CPU   CPUS  USED    RAM  READ/s  WRITTEN/s  IN/s  OUT/s",
            "> apple  Running  150%  2     412Mi   2Gi  2.9Ki   0          2Mi   1Ki",
            "  pear   Running  2%    2     ~700Mi  2Gi  2.9Ki   0          -     -",
            "  fig    Running",
            "  plum   Stopped",
            "",
            "",
            "  up/down  s: start  x: stop  c: console  C M D N A: sort by CPU memory disk network name  q: quit",
        ];
        assert_eq!(drawn(&screen()), expected.join("\n"));
    }

    #[test]
    fn without_a_terminal_it_is_a_table() {
        let mut screen = screen();
        screen.has_namespaces = true;
        screen.sort = Sort::Name;
        let expected = [
            "NAMESPACE   NAME    PHASE     CPU    CPUS   USED     RAM   READ/s   WRITTEN/s   IN/s   OUT/s",
            "vms         apple   Running   150%   2      412Mi    2Gi   2.9Ki    0           2Mi    1Ki",
            "vms         fig     Running",
            "vms         pear    Running   2%     2      ~700Mi   2Gi   2.9Ki    0           -      -",
            "vms         plum    Stopped",
        ];
        assert_eq!(screen.page().lines().collect::<Vec<_>>(), expected);
        assert_eq!(screen.troubles(), ["vm/fig: pods \"fig\" is forbidden\u{fffd}[2J"]);
    }

    #[test]
    fn keys_select_sort_and_act_on_the_selected_vm() {
        let mut screen = screen();
        let mut press = |code: KeyCode| screen.key(KeyEvent::from(code));
        assert_eq!(press(KeyCode::Char('s')), Some(Act::Start(key("apple"))), "the first is selected");
        assert_eq!(press(KeyCode::Down), None);
        assert_eq!(press(KeyCode::Enter), Some(Act::Console(key("pear"))));
        // The selection follows the VM, not the line.
        assert_eq!(press(KeyCode::Char('A')), None);
        assert_eq!(press(KeyCode::Char('c')), Some(Act::Console(key("pear"))));
        // A stop is confirmed.
        assert_eq!(press(KeyCode::Char('x')), None);
        assert_eq!(press(KeyCode::Char('n')), None);
        assert_eq!(press(KeyCode::Char('x')), None);
        assert_eq!(press(KeyCode::Char('y')), Some(Act::Stop(key("pear"))));
        for _ in 0..9 {
            press(KeyCode::Down);
        }
        assert_eq!(press(KeyCode::Char('s')), Some(Act::Start(key("plum"))), "the last in the order of names");
        for _ in 0..9 {
            press(KeyCode::Up);
        }
        assert_eq!(press(KeyCode::Char('s')), Some(Act::Start(key("apple"))));
        assert_eq!(press(KeyCode::Char('q')), Some(Act::Quit));
        assert_eq!(screen.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Some(Act::Quit));
        let names =
            |sort: Sort| Screen { sort, ..screen.clone() }.order().iter().map(|key| key.1.clone()).collect::<Vec<_>>();
        assert_eq!(names(Sort::Memory)[..2], ["pear", "apple"]);
        assert_eq!(names(Sort::Name), ["apple", "fig", "pear", "plum"]);
        assert_eq!(Screen::default().key(KeyEvent::from(KeyCode::Char('s'))), None, "no VMs");
    }

    #[test]
    fn amounts_are_short() {
        let shown = [0.0, 512.4, 1000.0, 1536.0, 20.0 * 1_048_576.0, 2.0 * 1_073_741_824.0].map(short);
        assert_eq!(shown, ["0", "512", "1Ki", "1.5Ki", "20Mi", "2Gi"]);
    }
}
