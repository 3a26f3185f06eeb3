package apikey

import (
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"unicode"
)

// MinKeyLength is the minimum length of a plain key: a shorter one can be guessed.
const MinKeyLength = 20

// Secret is one line of a keys file: the hash of a key, and the name of its tenant.
type Secret struct {
	Name string
	Hash Hash
	Line int // from 1
}

// ParseFile parses a keys file. Each line has a name, spaces, and a plain key or "sha256:" followed
// by the hash in hexadecimal. Empty lines and those that begin with # are skipped. A name may have
// several keys. Each error names its line and what to do, and shows nothing of the content.
func ParseFile(data string) (secrets []Secret, errs []error) {
	n := 0
	for line := range strings.Lines(data) {
		n++
		s, err := parseLine(line)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("line %d: %w", n, err))
		case s.Name != "":
			s.Line = n
			secrets = append(secrets, s)
		}
	}
	return secrets, errs
}

func parseLine(line string) (s Secret, err error) {
	fields := strings.Fields(line)
	switch {
	case len(fields) == 0 || strings.HasPrefix(fields[0], "#"):
		return Secret{}, nil
	case len(fields) != 2:
		return Secret{}, errors.New("expected a name, a space and a key")
	case !IsValidName(strings.TrimSuffix(fields[0], ":")): // a colon is what YAML has there
		return Secret{}, errors.New("invalid name: " + NameRule)
	}
	s.Name = strings.TrimSuffix(fields[0], ":")
	if given, hashed := strings.CutPrefix(fields[1], "sha256:"); hashed {
		s.Hash, err = ParseHash(given)
		return s, err
	}
	if len(fields[1]) < MinKeyLength || strings.ContainsFunc(fields[1], func(r rune) bool { return r <= ' ' || r > '~' }) {
		return Secret{}, fmt.Errorf("the key must have at least %d visible ASCII characters; create one with openssl rand -hex 32", MinKeyLength)
	}
	s.Hash = HashOf(fields[1])
	return s, nil
}

// ParseHash parses a hash in the format of sha256sum.
func ParseHash(text string) (h Hash, err error) {
	digits, _, _ := strings.Cut(strings.TrimSpace(text), " ")
	if n, err := hex.Decode(h[:], []byte(digits[:min(len(digits), 2*len(h))])); err != nil || n != len(h) || len(digits) != 2*len(h) {
		return Hash{}, errors.New(`not a SHA-256 hash: use the 64 digits that printf %s "$KEY" | sha256sum prints`)
	}
	return h, nil
}

// NameRule describes the names that IsValidName accepts.
const NameRule = "it is used in metrics; use 1 to 100 letters, digits and ._:@/-"

// IsValidName reports whether name can be the name of a key.
func IsValidName(name string) bool {
	return name != "" && len(name) <= 100 && !strings.ContainsFunc(name, func(r rune) bool {
		return r > unicode.MaxASCII || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("._:@/-", r)
	})
}
