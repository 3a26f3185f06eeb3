package cluster

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"

	"github.com/zeebo/xxh3"
)

// authenticator computes and verifies the sums of messages and snapshots. With a secret a sum is an
// HMAC-SHA256, which shows that a proxy with the same secret wrote the data. Without one it is a
// checksum, which shows damage only.
type authenticator struct {
	secret string
	prefix string // of the keys in Redis: sums of another fleet are invalid
}

// The purposes of sums: what was written for one is invalid for another.
const (
	messagePurpose  = "message"
	snapshotPurpose = "snapshot"
	recordPurpose   = "record"
)

func (a authenticator) isSigned() bool { return a.secret != "" }

func (a authenticator) sumSize() int {
	if a.isSigned() {
		return sha256.Size
	}
	return 8
}

// appendSum appends the sum of data to b.
func (a authenticator) appendSum(b []byte, purpose string, data []byte) []byte {
	if !a.isSigned() {
		return binary.LittleEndian.AppendUint64(b, xxh3.Hash(data))
	}
	sum := hmac.New(sha256.New, []byte(a.secret))
	sum.Write([]byte(purpose + "\x00" + a.prefix + "\x00"))
	sum.Write(data)
	return sum.Sum(b)
}

func (a authenticator) verify(sum []byte, purpose string, data []byte) bool {
	return hmac.Equal(sum, a.appendSum(nil, purpose, data))
}
