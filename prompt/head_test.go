package prompt

import "testing"

func TestHeadIsContinuedBy(t *testing.T) {
	head := HeadOf([]Block{1, 2, 3})
	for _, c := range []struct {
		blocks []Block
		want   bool
	}{
		{[]Block{1, 2, 3}, true},
		{[]Block{1, 2, 3, 4}, true},
		{[]Block{1, 2}, false},
		{[]Block{1, 2, 4, 3}, false},
		{[]Block{3}, false},
		{nil, false},
	} {
		if got := head.IsContinuedBy(c.blocks); got != c.want {
			t.Errorf("%v continues it: %v, want %v", c.blocks, got, c.want)
		}
	}
	if none := HeadOf(nil); none.Len() != 0 || none.IsContinuedBy([]Block{1}) || none.IsContinuedBy(nil) {
		t.Error("a prompt continues one without blocks")
	}
}
