package prompt

// TextClass groups prompts whose texts have about the same number of bytes per token, whatever
// the tokenizer is. The zero value is the class of a prompt without text.
type TextClass uint8

const (
	noText   TextClass = iota
	TokenIDs           // each has TokenIDBytes

	// Of a text in ASCII, by the share of word bytes: from numbers and base64 over JSON
	// and code to prose.
	firstASCIIClass

	// Of a text with another script, by the share of that script: scriptLevels for each.
	firstScriptClass = firstASCIIClass + asciiLevels

	// TextClasses is the number of classes.
	TextClasses = firstScriptClass + TextClass(byteKinds-firstScript)*scriptLevels
)

// TokenIDBytes is the size of a token id in the canonical prompt.
const TokenIDBytes = 4

const (
	asciiLevels    = 8
	scriptLevels   = 4
	minScriptShare = 1.0 / 64 // of the text, below which it counts as ASCII

	// TextClass reads a sample of so many runs.
	sampleRuns     = 32
	sampleRunBytes = 32
)

// byteKind is what a byte of UTF-8 says about the text. The first byte of a character
// names its script.
type byteKind uint8

const (
	wordByte byteKind = iota // a lower-case letter of ASCII, or space
	latin
	greek
	cyrillic
	semitic // Armenian, too
	indic   // Thai and its neighbours, too
	cjk
	hangul
	byteKinds

	firstScript = latin
)

// byteCounts counts the kinds of bytes: the values of up to maxSummedBytes add up to a number
// whose byte i is how many are of kind i. Other bytes are of no kind: the rest of ASCII,
// punctuation of all scripts, and what begins no character.
var byteCounts = func() (counts [256]uint64) {
	for _, r := range []struct {
		first, last byte
		kind        byteKind
	}{
		{'a', 'z', wordByte}, {' ', ' ', wordByte}, {'\t', '\n', wordByte},
		{0xc3, 0xc9, latin}, {0xe1, 0xe1, latin}, // 0xe1 begins most letters of Vietnamese
		{0xcd, 0xcf, greek}, {0xd0, 0xd3, cyrillic}, {0xd4, 0xdf, semitic},
		{0xe0, 0xe0, indic}, {0xe3, 0xe9, cjk}, {0xea, 0xed, hangul},
	} {
		for c := int(r.first); c <= int(r.last); c++ {
			counts[c] = 1 << (8 * r.kind)
		}
	}
	return counts
}()

const maxSummedBytes = 255

// sumByteCounts returns the sum of the byteCounts of b, with less than half of the instructions of a loop over each byte.
func sumByteCounts(b []byte) (sum uint64) {
	n := &byteCounts
	for ; len(b) >= 8; b = b[8:] {
		sum += n[b[0]] + n[b[1]] + n[b[2]] + n[b[3]] + n[b[4]] + n[b[5]] + n[b[6]] + n[b[7]]
	}
	for _, c := range b {
		sum += n[c]
	}
	return sum
}

// kindCounts is how many bytes are of each kind.
type kindCounts [byteKinds]int

// add adds a sum of byteCounts.
func (n *kindCounts) add(sum uint64) {
	for kind := range n {
		n[kind] += int(sum >> (8 * kind) & 0xff)
	}
}

// TextClass returns the class of the prompt with these media items, from a sample of the text
// between them.
func (p *Prompt) TextClass(media []MediaPosition) TextClass {
	if p.format == formatIDs {
		return TokenIDs
	}
	var counts kindCounts
	var sum uint64 // of the byteCounts of bytes that are not in counts yet
	size, summed := 0, 0
	step := max(sampleRunBytes, (len(p.Text)-len(media)*MediaBytes)/sampleRuns)
	for at := 0; at < len(p.Text); at += step {
		for len(media) > 0 && at+sampleRunBytes > media[0].Offset {
			at = media[0].Offset + MediaBytes
			media = media[1:]
		}
		run := p.Text[at:min(at+sampleRunBytes, len(p.Text))]
		if summed += len(run); summed > maxSummedBytes {
			counts.add(sum)
			sum, summed = 0, len(run)
		}
		sum += sumByteCounts(run)
		size += len(run)
	}
	counts.add(sum)
	if size == 0 {
		return noText
	}
	mainScript, mainBytes := firstScript, 0
	for kind := firstScript; kind < byteKinds; kind++ {
		n := 2 * counts[kind]
		if kind >= indic {
			n = 3 * counts[kind]
		}
		if n > mainBytes {
			mainScript, mainBytes = kind, n
		}
	}
	if float64(mainBytes) < minScriptShare*float64(size) {
		return firstASCIIClass + levelOf(counts[wordByte], size, asciiLevels)
	}
	return firstScriptClass + TextClass(mainScript-firstScript)*scriptLevels + levelOf(mainBytes, size, scriptLevels)
}

// levelOf returns in which of so many equal parts of size n is.
func levelOf(n, size, levels int) TextClass { return TextClass(min(n*levels/size, levels-1)) }

// IsLatin reports whether a prompt of the class is in the Latin script, or less than a quarter of
// it is in another. Languages and formats of such a class differ most in their bytes per token.
func (c TextClass) IsLatin() bool {
	return c < firstScriptClass+scriptLevels || (c-firstScriptClass)%scriptLevels == 0
}
