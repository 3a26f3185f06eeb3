package prompt

import "slices"

// Layout says where the chat template of a model puts what templates put in different
// places. It is learned, as the template is not known.
type Layout uint8

const (
	// SystemInPlace: system messages between the others stay where they are. Without it they
	// are part of the first, as vLLM has it in Messages for templates that accept no others.
	SystemInPlace Layout = 1 << iota
	// DeveloperInPlace is SystemInPlace for chats and Responses with a message of the role
	// developer. vLLM merges their system messages if the template does not know that role.
	DeveloperInPlace
	// ToolsFirst: the tools stand before the first system message, not after it.
	ToolsFirst
	// KeepReasoning: reasoning stays. Without it, it is dropped at the next user message.
	KeepReasoning

	numLayoutBits = iota

	// DefaultLayout is the most common one.
	DefaultLayout = SystemInPlace | DeveloperInPlace
)

// LayoutBits are the bits of a Layout, each of which is learned by itself.
var LayoutBits = [numLayoutBits]Layout{SystemInPlace, DeveloperInPlace, ToolsFirst, KeepReasoning}

var layoutBitNames = [numLayoutBits]string{"system-in-place", "developer-in-place", "tools-first", "keep-reasoning"}

// BitNames returns the names of the bits that are set.
func (l Layout) BitNames() []string {
	names := []string{}
	for i, bit := range LayoutBits {
		if l&bit != 0 {
			names = append(names, layoutBitNames[i])
		}
	}
	return names
}

// Fork compares two layouts that differ in one bit: how much of the prompt of a request, which
// continues a conversation, its previous request has left in a replica's cache. It is more with
// the bit. All are shares of the prompt.
type Fork struct {
	Bit                  Layout
	Without, WithoutMost float64 // cached without the bit, at least and at most
	With                 float64 // cached with the bit, at most
}

// movable is a part of Text that some layouts move or leave out: reasoning, or a system
// message between the others.
type movable struct {
	start, end int
	text       int // where the text of a system message begins; 0: it is reasoning
}

func (m *movable) isSystem() bool { return m.text > 0 }

// systemBit returns the bit that says whether system messages between the others stay where
// they are; 0 if they always do.
func (p *Prompt) systemBit() Layout {
	switch {
	case p.kind == Messages:
		return SystemInPlace
	case p.turns.developer:
		return DeveloperInPlace
	}
	return 0
}

// ApplyLayout completes Text, once after Parse: it inserts the system prompt and the tools,
// and moves or drops what the layout has elsewhere. The beginning of a prompt that continues a
// stored response is not known.
func (p *Prompt) ApplyLayout(l Layout) {
	p.layout = l
	if p.kind != Chat && p.kind != Messages && p.kind != Responses || p.PreviousResponse != "" {
		return
	}
	if len(p.turns.movable) > 0 {
		p.forks = p.appendForks(p.forks[:0])
	}
	p.dropReasoningAndMergeSystem()
	p.insertHead()
}

// merges reports whether the layout makes system messages part of the first.
func (p *Prompt) merges() bool {
	bit := p.systemBit()
	return bit != 0 && p.layout&bit == 0
}

// dropReasoningAndMergeSystem removes from Text the reasoning that the layout drops, and the system messages
// that it merges, whose texts it appends to p.merged.
func (p *Prompt) dropReasoningAndMergeSystem() {
	t, merges, end, from := &p.turns, p.merges(), 0, 0
	p.merged = p.merged[:0]
	for i := range t.movable {
		m := &t.movable[i]
		if m.isSystem() && !merges || !m.isSystem() && (p.layout&KeepReasoning != 0 || m.start >= t.user) {
			continue
		}
		if m.isSystem() {
			if len(p.merged) == 0 && len(p.system) == 0 && t.leadingEnd == 0 {
				p.merged = beginMessage(p.merged, "system")
			} else if p.kind != Messages {
				p.merged = append(p.merged, "\n\n"...)
			}
			p.merged = append(p.merged, p.Text[m.text:m.end]...)
		}
		end += copy(p.Text[end:], p.Text[from:m.start])
		from = m.end
	}
	if from > 0 {
		end += copy(p.Text[end:], p.Text[from:])
		p.Text = p.Text[:end]
	}
}

// insertHead inserts the system prompt, merged system messages and the tools.
func (p *Prompt) insertHead() {
	leading, end, size := p.turns.leadingEnd, len(p.Text), len(p.system)+len(p.merged)+p.toolsBytes()
	if size == 0 {
		return
	}
	p.Text = slices.Grow(p.Text, size)[:end+size]
	copy(p.Text[leading+size:], p.Text[leading:end])
	at := len(p.system)
	if p.layout&ToolsFirst != 0 {
		at += p.toolsBytes()
	}
	copy(p.Text[at:], p.Text[:leading])
	copy(p.Text[at-len(p.system):], p.system)
	at += leading
	at += copy(p.Text[at:], p.merged)
	if p.layout&ToolsFirst != 0 {
		at = 0
	}
	at += copy(p.Text[at:], p.toolList())
	copy(p.Text[at:], p.toolChanges)
}

// toolList returns the canonical form of the tools.
func (p *Prompt) toolList() []byte {
	if !p.hasTools {
		return nil
	}
	return p.tools.text
}

// toolsBytes returns the length of the tools and of the changes to them.
func (p *Prompt) toolsBytes() int { return len(p.toolList()) + len(p.toolChanges) }

// dropsReasoningLater reports whether Text contains reasoning that the layout drops at the next
// user message.
func (p *Prompt) dropsReasoningLater() bool {
	return p.layout&KeepReasoning == 0 && slices.ContainsFunc(p.turns.movable, func(m movable) bool {
		return !m.isSystem() && m.start >= p.turns.user
	})
}

// Forks returns where the prompt parts from those under other layouts, newly allocated; nil if
// it does not, or that cannot be observed.
func (p *Prompt) Forks() []Fork { return slices.Clone(p.forks) }

// movableBytes returns how many bytes of reasoning that a layout may drop, and of system
// messages between the others, stand before a place in Text, and how many texts of such
// messages would be merged.
func (t *turns) movableBytes(before int) (reasoning, system, texts int) {
	for i := range t.movable {
		switch m := &t.movable[i]; {
		case m.start >= before:
			return reasoning, system, texts
		case m.isSystem():
			system += m.end - m.start
			texts += m.end - m.text
		case m.start < t.user:
			reasoning += m.end - m.start
		}
	}
	return reasoning, system, texts
}

// appendForks appends the forks of a Text that is not completed yet.
func (p *Prompt) appendForks(dst []Fork) []Fork {
	t, merges, keeps := &p.turns, p.merges(), p.layout&KeepReasoning != 0
	head := len(p.system) + p.toolsBytes()
	// place returns where a place in Text is in a prompt of that layout.
	place := func(at int, merges, keeps bool) float64 {
		reasoning, system, _ := t.movableBytes(at)
		_, _, texts := t.movableBytes(len(p.Text))
		if keeps {
			reasoning = 0
		}
		if !merges {
			system, texts = 0, 0
		}
		return float64(head + texts + at - reasoning - system)
	}
	total := func(merges, keeps bool) float64 { return place(len(p.Text), merges, keeps) }

	if group, first := t.lastSystemGroup(); group > 0 && p.systemBit() != 0 && (!merges || !first) {
		_, _, texts := t.movableBytes(group)
		system := float64(len(p.system) + t.leadingEnd + texts)
		most, all := system+float64(p.toolsBytes()), total(true, keeps)
		dst = append(dst, Fork{p.systemBit(), system / all, most / all, place(group, false, keeps) / total(false, keeps)})
		if merges {
			dst = append(dst, Fork{ToolsFirst, system / all, system / all, most / all})
		}
	}
	for i := range t.movable {
		if m := &t.movable[i]; !m.isSystem() && m.start >= t.previousUser && m.start < t.user {
			without := place(m.start, merges, false) / total(merges, false)
			return append(dst, Fork{KeepReasoning, without, without, place(t.user, merges, true) / total(merges, true)})
		}
	}
	return dst
}

// lastSystemGroup returns where the last system messages between the others begin in Text, and
// whether there are none before; 0 if there are none.
func (t *turns) lastSystemGroup() (start int, first bool) {
	end := 0
	for i := range t.movable {
		if m := &t.movable[i]; m.isSystem() {
			if m.start != end {
				start, first = m.start, end == 0
			}
			end = m.end
		}
	}
	return start, first
}
