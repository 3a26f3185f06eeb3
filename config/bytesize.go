package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

type byteUnit struct {
	name  string
	bytes int64
}

func byteUnits() []byteUnit {
	return []byteUnit{
		{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
		{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"KB", 1e3}, {"B", 1},
	}
}

// parseByteSize parses a number of bytes, written as 64MiB, 64MB or 67108864. Units may be in any case. K and M
// alone are rejected: some read them as decimal, some as binary.
func parseByteSize(s string) (int64, error) {
	s = strings.TrimSpace(s)
	digits := strings.TrimRight(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
	n, err := strconv.ParseInt(digits, 10, 64)
	if errors.Is(err, strconv.ErrRange) {
		return 0, fmt.Errorf("%q is too large", s)
	}
	if err != nil {
		return 0, fmt.Errorf("%q is not a size such as 64MiB, 64MB or 67108864", s)
	}
	unit := strings.TrimSpace(s[len(digits):])
	if unit == "" {
		return n, nil
	}
	for _, u := range byteUnits() {
		if !strings.EqualFold(u.name, unit) {
			continue
		}
		if n > math.MaxInt64/u.bytes || n < math.MinInt64/u.bytes {
			return 0, fmt.Errorf("%q is too large", s)
		}
		return n * u.bytes, nil
	}
	return 0, fmt.Errorf("%q has the unknown unit %q; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB", s, unit)
}

// formatByteSize formats a size in the unit that needs the smallest number, so
// that 64MB and 64MiB both come back as they were written.
func formatByteSize(size int64) string {
	best := byteUnit{"B", 1}
	for _, u := range byteUnits() {
		if size != 0 && size%u.bytes == 0 && u.bytes > best.bytes {
			best = u
		}
	}
	return strconv.FormatInt(size/best.bytes, 10) + best.name
}
